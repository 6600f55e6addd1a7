// The grid of nodes and the detail of one. Cells are made once and then only changed: thousands of them stay smooth.

import { element, ago, table } from "./panels.js";

export const LETTERS = {
  member: "M", spare: "S", suspect: "?", gone: "×", quarantined: "Q", draining: "D", unhealthy: "!", cordoned: "C",
};
const MEANING = {
  member: "runs a job", spare: "ready, not used", suspect: "silent", gone: "agent not connected", quarantined: "hardware not trusted",
  draining: "being emptied", unhealthy: "failed a check", cordoned: "takes no new work",
};
const MOST_NAMED = 96;
const cells = new Map();
let chosen = "";
let filter = "";
let choose = () => {};

export function start(grid, onChoose) {
  choose = onChoose;
  grid.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) pick(cell.dataset.node);
  });
  grid.addEventListener("keydown", (event) => {
    const cell = event.target.closest(".cell");
    const next = cell && neighbour(grid, cell, event.key);
    if (!next) return;
    event.preventDefault();
    focusable(next);
    next.focus();
  });
}

export function setFilter(text) {
  filter = text.trim().toLowerCase();
  for (const cell of cells.values()) cell.hidden = !matches(cell);
  const grid = [...cells.values()][0]?.parentElement;
  if (grid) nameFew(grid);
  if (![...cells.values()].some((cell) => cell.tabIndex === 0 && !cell.hidden)) {
    const first = [...cells.values()].find((cell) => !cell.hidden);
    if (first) focusable(first);
  }
}

// few cells have room for their names
function nameFew(grid) {
  let shown = 0;
  for (const cell of cells.values()) if (!cell.hidden) shown += 1;
  grid.classList.toggle("named", shown <= MOST_NAMED);
}

const matches = (cell) => !filter || cell.dataset.node.toLowerCase().includes(filter) || cell.dataset.state.includes(filter);

function focusable(cell) {
  for (const other of cells.values()) if (other.tabIndex === 0) other.tabIndex = -1;
  cell.tabIndex = 0;
}

function neighbour(grid, cell, key) {
  const shown = [...grid.children].filter((item) => !item.hidden);
  const index = shown.indexOf(cell);
  const top = shown[0].offsetTop;
  const columns = Math.max(1, shown.findIndex((item) => item.offsetTop > top) === -1 ? shown.length : shown.findIndex((item) => item.offsetTop > top));
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  if (key === "Home") return shown[0];
  if (key === "End") return shown[shown.length - 1];
  return key in moves ? shown[index + moves[key]] : undefined;
}

function pick(name) {
  const before = cells.get(chosen);
  if (before) before.setAttribute("aria-pressed", "false");
  chosen = name;
  const cell = cells.get(name);
  if (cell) {
    cell.setAttribute("aria-pressed", "true");
    focusable(cell);
  }
  choose(name);
}

export const chosenNode = () => chosen;

function describe(name, row) {
  const [state, slots, health, job, ranks] = row;
  const runs = ranks.length ? `, ranks ${ranks[0]} to ${ranks[ranks.length - 1]} of ${job}` : "";
  return `${name}: ${state}, ${slots} slots, health ${health}${runs}`;
}

// rows: {name: row or null}; whole: true when it is the whole list
export function update(grid, rows, whole) {
  if (whole) {
    for (const [name, cell] of cells) if (!(name in rows)) { cell.remove(); cells.delete(name); }
  }
  const fresh = document.createDocumentFragment();
  for (const [name, row] of Object.entries(rows)) {
    let cell = cells.get(name);
    if (row === null) {
      if (cell) { cell.remove(); cells.delete(name); }
      continue;
    }
    if (!cell) {
      cell = element("button", { type: "button", className: "cell", tabIndex: cells.size ? -1 : 0 });
      cell.dataset.node = name;
      cell.setAttribute("aria-pressed", "false");
      cells.set(name, cell);
      fresh.append(cell);
    }
    if (cell.dataset.state !== row[0]) {
      cell.dataset.state = row[0];
      cell.textContent = LETTERS[row[0]] ?? "·";
    }
    const text = describe(name, row);
    if (cell.title !== text) { cell.title = text; cell.setAttribute("aria-label", text); }
    cell.hidden = !matches(cell);
  }
  grid.append(fresh);
  nameFew(grid);
}

// a click on a state shows its nodes only, the next click all
export function legend(target, nodes, only) {
  const counts = {};
  for (const row of Object.values(nodes)) counts[row[0]] = (counts[row[0]] ?? 0) + 1;
  const items = Object.keys(LETTERS).filter((state) => counts[state]).map((state) => {
    const sample = element("span", { className: "cell", textContent: LETTERS[state] });
    sample.dataset.state = state;
    sample.setAttribute("aria-hidden", "true");
    const button = element("button", { type: "button", title: MEANING[state] });
    button.append(sample, `${counts[state]} ${state}`);
    button.dataset.only = state;
    button.setAttribute("aria-pressed", String(filter === state));
    button.addEventListener("click", () => only(filter === state ? "" : state));
    const item = element("li");
    item.append(button);
    return item;
  });
  const focused = target.contains(document.activeElement) ? document.activeElement.dataset.only : "";
  target.replaceChildren(...items);
  if (focused) target.querySelector(`[data-only="${focused}"]`)?.focus();
}

export function detail(target, node, order) {
  const title = element("h3", { textContent: node.node });
  const state = element("p", { textContent: `${node.state}, ${node.slots} slots, ${node.address || "no address"}` });
  const parts = [title, state];
  if (node.silent_seconds !== null) parts.push(element("p", { className: "bad", textContent: `silent for ${ago(node.silent_seconds)}` }));
  if (node.unusable) parts.push(element("p", { className: "bad", textContent: `unusable: ${node.unusable}` }));
  const health = node.health;
  parts.push(element("p", { textContent: `health: ${health.state}${health.reason ? `: ${health.reason}` : ""}` }));
  parts.push(evidence(health.evidence.filter((line) => !health.reason.includes(line))));
  if (node.quarantine) {
    const record = node.quarantine;
    parts.push(element("p", { className: "bad", textContent: `${record.state} (strike ${record.strikes})${health.reason.includes(record.reason) ? "" : `: ${record.reason}`}` }));
  }
  const local = node.jobs.flatMap((job) => job.ranks.map((rank) => `${job.job} rank ${rank}`));
  const rows = Array.from({ length: Math.max(node.devices.length, node.slots) }, (_, index) => {
    const uuid = node.devices[index] ?? "no GPU known";
    const bad = health.device_uuids.includes(uuid) ? "suspect" : node.quarantine && node.quarantine.key === uuid ? "quarantined" : "";
    return [String(index), gpu(uuid, node.readings?.gpus[uuid]), local[index] ?? "idle", bad];
  });
  parts.push(table(["slot", "GPU", "runs", ""], rows));
  if (node.devices.length && node.readings?.problem) parts.push(element("p", { className: "soft", textContent: `No readings: ${node.readings.problem}.` }));
  const buttons = element("div", { className: "buttons" });
  const orders = node.cordoned || node.draining ? ["uncordon"] : ["cordon", "drain"];
  if (node.quarantine) orders.push("clear");
  for (const name of orders) {
    const button = element("button", { type: "button", textContent: name });
    button.dataset.order = name;
    button.addEventListener("click", () => order(node.node, name));
    buttons.append(button);
  }
  parts.push(buttons);
  target.replaceChildren(...parts);
}

// its name, and below it what it reads now
function gpu(uuid, reads) {
  const cell = element("span", { textContent: uuid });
  if (!reads) return cell;
  const parts = [];
  if ("temperature_celsius" in reads) parts.push(`${reads.temperature_celsius} °C${"slowdown_celsius" in reads ? ` (slows down at ${reads.slowdown_celsius})` : ""}`);
  if ("memory_used_bytes" in reads) parts.push(`${gib(reads.memory_used_bytes)} of ${gib(reads.memory_bytes)} GiB`);
  if ("power_watts" in reads) parts.push(`${Math.round(reads.power_watts)} W`);
  if ("busy_ratio" in reads) parts.push(`${Math.round(100 * reads.busy_ratio)} % busy`);
  if (reads.lost === 1) parts.push("lost to the driver");
  cell.append(element("br"), element("span", { className: "soft", textContent: parts.join(", ") }));
  return cell;
}

const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);

function evidence(lines) {
  const list = element("ul", { className: "evidence" });
  for (const text of lines.slice(0, 8)) list.append(element("li", { textContent: text }));
  if (lines.length === 0) list.hidden = true;
  return list;
}
