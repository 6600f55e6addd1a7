// Panels that are drawn anew when their data changed: mesh, generations, incidents, checkpoints, quarantine, journal.

const PHASES = ["detect", "decide", "fence", "stop", "start", "rendezvous", "restore", "first_step"];
const SHORT = ["det", "dec", "fen", "stop", "sta", "ren", "res", "1st"];
const NARROW = 0.05;
const MOST_RANK_CELLS = 256;
const MOST_STAGE_CELLS = 4096;

export function element(name, properties = {}) {
  return Object.assign(document.createElement(name), properties);
}

export function ago(seconds) {
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

// +0.12 or -3.40; what rounds to nothing is 0.00 and has no sign
function signed(seconds) {
  const text = Math.abs(seconds).toFixed(2);
  return `${Number(text) === 0 ? "" : seconds < 0 ? "−" : "+"}${text}`;
}

// cells: text or elements; header names that begin with "#" hold numbers
export function table(header, rows) {
  const made = element("table");
  const head = made.createTHead().insertRow();
  const numeric = header.map((name) => name.startsWith("#"));
  header.forEach((name, index) => {
    const cell = element("th", { textContent: numeric[index] ? name.slice(1) : name, scope: "col", className: numeric[index] ? "number" : "" });
    head.append(cell.textContent ? cell : element("td"));
  });
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, index) => {
      const cell = line.insertCell();
      if (numeric[index]) cell.className = "number";
      cell.append(value);
    });
  }
  return made;
}

const soft = (text) => element("p", { className: "soft", textContent: text });

export function mesh(target, text, job, nodes) {
  const axes = job.axes;
  if (!axes) {
    text.textContent = "Nothing runs.";
    target.replaceChildren();
    return;
  }
  const owner = [];
  for (const [name, row] of Object.entries(nodes)) if (row[3] === job.job) for (const rank of row[4]) owner[rank] = name;
  const world = axes.dp * axes.pp * axes.cp * axes.tp;
  const inner = axes.cp * axes.tp;
  text.textContent = `${job.mesh}: ${world} ranks. A block is a data-parallel replica, a row a pipeline stage, a column a tensor-parallel rank.`;
  const parts = [];
  const byRank = world <= MOST_RANK_CELLS;
  const replicas = Math.min(axes.dp, Math.max(1, Math.floor(MOST_STAGE_CELLS / axes.pp)));
  for (let dp = 0; dp < replicas; dp += 1) {
    const rows = [];
    for (let pp = 0; pp < axes.pp; pp += 1) {
      const first = (dp * axes.pp + pp) * inner;
      const ranks = Array.from({ length: inner }, (_, index) => first + index);
      if (byRank) rows.push([`pp ${pp}`, ...ranks.map((rank) => `${rank} ${owner[rank] ?? "?"}`)]);
      else rows.push([`pp ${pp}`, `${first}–${first + inner - 1} ${[...new Set(ranks.map((rank) => owner[rank] ?? "?"))].join(" ")}`]);
    }
    const block = element("div", { className: "replica" });
    const names = byRank ? Array.from({ length: inner }, (_, index) => (axes.cp > 1 ? `cp ${Math.floor(index / axes.tp)} tp ${index % axes.tp}` : `tp ${index}`)) : ["ranks and nodes"];
    block.append(element("h3", { textContent: `dp ${dp}` }), table(["", ...names], rows));
    parts.push(block);
  }
  if (replicas < axes.dp) parts.push(soft(`${axes.dp - replicas} more replicas are not drawn.`));
  target.replaceChildren(...parts);
}

export function timeline(target, job, now) {
  const all = job.generations;
  if (all.length === 0) return target.replaceChildren(soft("No generation yet."));
  const begin = all[0].at, span = Math.max(1e-3, (all[all.length - 1].ended_at ?? now) - begin);
  const rows = [...all].reverse().slice(0, 60).map((item) => {
    const end = item.ended_at ?? now;
    const row = element("div", { className: "generation" });
    const track = element("div", { className: "track" });
    const place = (bar, from, to) => {
      bar.style.left = `${(100 * (from - begin)) / span}%`;
      bar.style.width = `${(100 * Math.max(0, to - from)) / span}%`;
      track.append(bar);
    };
    place(element("i", { className: "start" }), item.at, item.first_step_at ?? end);
    if (item.first_step_at !== null) place(element("i"), item.first_step_at, end);
    const steps = item.last_step === null ? "no step" : `to step ${item.last_step}`;
    const began = item.first_step_at === null ? "" : `, first step after ${ago(item.first_step_at - item.at)}`;
    const text = `${clock(item.at)}, ${ago(end - item.at)}: ${item.mesh} on ${item.num_nodes} nodes, ${steps}${began}; ${item.end || "running"}`;
    row.append(element("b", { textContent: `g${item.number}` }), element("span", { textContent: text }), track, element("span", { className: "soft", textContent: item.reason }));
    return row;
  });
  target.replaceChildren(soft("Orange: from the decision to the first step. Blue: training."), ...rows);
}

export function phases(values) {
  const bar = element("div", { className: "phases" });
  const total = Object.values(values).reduce((sum, value) => sum + value, 0) || 1;
  const words = [];
  PHASES.forEach((name, index) => {
    if (!(name in values)) return;
    const part = element("i", { className: `p${index}`, textContent: values[name] / total < NARROW ? "" : SHORT[index], title: `${name} ${values[name].toFixed(2)} s` });
    part.style.flex = `${values[name] / total} 1 0`;
    part.setAttribute("aria-hidden", "true");
    bar.append(part);
    words.push(`${name.replace("_", " ")} ${values[name].toFixed(2)} s`);
  });
  return [bar, soft(words.join(" · "))];
}

export function incidents(target, job) {
  const open = new Set([...target.querySelectorAll("details[open]")].map((item) => item.dataset.id));
  const all = [...job.incidents.map((item) => [item, "incident"]), ...job.changes.map((item) => [item, "wanted change"])];
  all.sort((a, b) => b[0].at - a[0].at);
  if (all.length === 0) return target.replaceChildren(soft("None: nothing has failed."));
  const made = all.slice(0, 60).map(([item, kind]) => {
    const box = element("details", { open: open.has(item.id) });
    box.dataset.id = item.id;
    const where = [item.node, item.rank >= 0 ? `rank ${item.rank}` : "", item.device].filter(Boolean).join(", ");
    const time = item.seconds !== null ? `recovered in ${item.seconds.toFixed(2)} s` : item.closed ? "closed" : `open, in ${item.phase || "detect"}`;
    box.append(element("summary", { textContent: `${clock(item.at)} ${kind}: ${item.kind.replace("_", " ")}${where ? ` (${where})` : ""}, ${time}` }));
    box.append(element("p", { textContent: `${item.text || item.kind}. Cause: ${item.cause}. Answer: ${item.rung || "none"}, generation ${item.generation_before} → ${item.generation_after || "none"}, ${item.lost_steps ?? 0} steps computed again.` }));
    box.append(...phases(item.phases));
    if (item.reason) box.append(element("p", { className: "soft", textContent: `Why: ${item.reason}` }));
    const list = element("ul", { className: "evidence" });
    for (const found of item.evidence) {
      list.append(element("li", { textContent: `${signed(found.at - item.at)} s ${found.kind.replaceAll("_", " ")} ${found.text}` }));
    }
    if (item.evidence.length) box.append(list);
    return box;
  });
  target.replaceChildren(...made);
}

export function checkpoints(target, job, now) {
  const all = [...job.checkpoints].sort((a, b) => b.step - a.step);
  if (all.length === 0) return target.replaceChildren(soft("None is committed."));
  const rows = all.map((item) => {
    const verified = item.damaged ? `damaged: ${item.damaged}` : item.evidence.length ? `verified (${item.evidence.map((name) => name.replaceAll("_", " ")).join(", ")})` : "committed";
    return [String(item.step), String(item.generation), ago(Math.max(0, now - item.at)), tier(item.directory), verified, item.directory.split("/").pop()];
  });
  target.replaceChildren(table(["#step", "#generation", "#age", "tier", "state", "folder"], rows));
}

const tier = (directory) => (/^[a-z0-9]+:\/\//i.test(directory) && !directory.startsWith("file:") ? "object store" : "file system");

export function quarantine(target, spares, state, order) {
  const names = Object.entries(state.nodes).filter(([, row]) => row[0] === "spare").map(([name]) => name);
  spares.textContent = names.length ? `${names.length} spare: ${names.slice(0, 40).join(", ")}${names.length > 40 ? " …" : ""}` : "No spare node.";
  const records = Object.values(state.quarantine);
  if (records.length === 0) return target.replaceChildren(soft("Nothing is quarantined."));
  const rows = records.map((item) => {
    const button = element("button", { type: "button", textContent: "clear" });
    button.setAttribute("aria-label", `clear ${item.node}`);
    button.addEventListener("click", () => order(item.node, "clear"));
    const until = item.until ? clock(item.until) : "";
    return [item.node, item.state, until, String(item.strikes), item.reason, item.key, item.state === "probation" ? "" : button];
  });
  target.replaceChildren(table(["node", "state", "until", "#strikes", "reason", "hardware", ""], rows));
}

export function journal(target, lines) {
  const shown = lines.slice(-200).reverse().map(([, at, kind, job, node, generation, text]) => {
    const where = [job, node, generation ? `g${generation}` : ""].filter(Boolean).join(" ");
    return element("li", { textContent: `${clock(at)} ${kind} ${where}${text && text !== kind ? `: ${text}` : ""}` });
  });
  target.replaceChildren(...shown);
}
