// State, the stream from the supervisor, and orders to it. The token lives in this tab only.

import { draw } from "./charts.js";
import * as nodes from "./nodes.js";
import * as panels from "./panels.js";

const byId = (id) => document.getElementById(id);
const MOST_POINTS = 2000;
const MOST_LINES = 400;
const RETRY_MILLISECONDS = 1000;
const TOKEN = "regrow-token";
const THEME = "regrow-theme";
const state = { nodes: {}, jobs: {}, quarantine: {}, steps: {}, log: [], at: 0, heard: 0 };
let job = "";
let dirty = new Set();
let scheduled = false;

// --- the stream

function headers() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { authorization: `Bearer ${token}` } : {};
}

async function listen() {
  for (;;) {
    try {
      const answer = await fetch("/v1/page", { headers: headers(), cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        linked(false, "token needed");
        const given = sessionStorage.getItem(TOKEN);
        await askToken(given ? `The token is not accepted: ${await problem(answer)}` : "To look at this cluster a token is needed.");
        continue;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      await read(answer.body);
    } catch (error) {
      linked(false, `not connected (${error.message})`);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
  }
}

async function read(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended");
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) receive(part);
  }
}

function receive(part) {
  const kind = /^event: (.*)$/m.exec(part)?.[1];
  const data = /^data: (.*)$/m.exec(part)?.[1];
  if (!kind || !data) return;
  const message = JSON.parse(data);
  if (kind === "whole") whole(message);
  else if (kind === "change") change(message);
  state.at = message.at;
  state.heard = performance.now();
  linked(true, "live");
}

function whole(message) {
  Object.assign(state, { steps: {}, log: [] }, message);
  nodes.update(byId("grid"), state.nodes, true);
  if (!state.jobs[job]) job = Object.keys(state.jobs)[0] ?? "";
  mark("cluster", "legend", "choice", "job", "charts", "mesh", "timeline", "incidents", "checkpoints", "quarantine", "log");
}

function change(message) {
  if (message.set) { Object.assign(state, message.set); mark("cluster", "quarantine"); }
  if (message.nodes) {
    if (Object.entries(message.nodes).some(([name, row]) => moved(state.nodes[name], row))) mark("mesh");
    merge(state.nodes, message.nodes);
    nodes.update(byId("grid"), message.nodes, false);
    mark("legend", "quarantine", "cluster");
    if (nodes.chosenNode() in message.nodes) showNode(nodes.chosenNode());
  }
  for (const [name, fields] of Object.entries(message.jobs ?? {})) changeJob(name, fields);
  for (const [name, points] of Object.entries(message.steps ?? {})) {
    const known = (state.steps[name] ??= []);
    known.push(...points);
    if (known.length > MOST_POINTS) known.splice(0, known.length, ...known.filter((_, index) => index % 2 || index > MOST_POINTS / 2));
    if (name === job) mark("charts");
  }
  if (message.log) {
    const last = state.log.length ? state.log[state.log.length - 1][0] : 0;
    state.log.push(...message.log.filter(([id]) => id > last));
    state.log.splice(0, state.log.length - MOST_LINES);
    mark("log");
  }
}

const moved = (before, after) => JSON.stringify(before?.slice(3, 5)) !== JSON.stringify(after?.slice(3, 5));

function changeJob(name, fields) {
  if (fields === null) { delete state.jobs[name]; mark("choice"); }
  else if (!state.jobs[name]) { state.jobs[name] = fields; mark("choice"); }
  else merge(state.jobs[name], fields);
  if (!state.jobs[job]) { job = Object.keys(state.jobs)[0] ?? ""; mark("choice", "charts", "mesh", "timeline", "incidents", "checkpoints"); }
  if (name !== job || fields === null) return;
  mark("job");
  if ("axes" in fields || "mesh" in fields) mark("mesh");
  if ("generations" in fields) mark("timeline", "charts");
  if ("incidents" in fields || "changes" in fields) mark("incidents");
  if ("checkpoints" in fields) mark("checkpoints");
}

function merge(target, changes) {
  for (const [key, value] of Object.entries(changes)) {
    if (value === null && target === state.nodes) delete target[key];
    else target[key] = value;
  }
}

// --- drawing: once a frame, only what changed

function mark(...names) {
  for (const name of names) dirty.add(name);
  if (scheduled) return;
  scheduled = true;
  const later = document.hidden ? (work) => setTimeout(work, 200) : requestAnimationFrame;
  later(render);
}

const DRAWERS = {
  cluster: drawCluster,
  legend: () => nodes.legend(byId("legend"), state.nodes, only),
  choice: drawChoice,
  job: () => drawJob(state.jobs[job]),
  charts: drawCharts,
  mesh: () => panels.mesh(byId("mesh"), byId("mesh-text"), shown(), state.nodes),
  timeline: () => panels.timeline(byId("timeline"), shown(), now()),
  incidents: () => panels.incidents(byId("incidents"), shown()),
  checkpoints: () => panels.checkpoints(byId("checkpoints"), shown(), now()),
  quarantine: () => panels.quarantine(byId("quarantine"), byId("spares"), state, orderNode),
  log: () => panels.journal(byId("log"), state.log),
};
const EMPTY = { job: "", axes: null, mesh: "", generations: [], incidents: [], changes: [], checkpoints: [] };
const shown = () => state.jobs[job] ?? EMPTY;
const now = () => (state.heard ? state.at + (performance.now() - state.heard) / 1000 : state.at);

function render() {
  scheduled = false;
  const names = dirty;
  dirty = new Set();
  for (const name of names) DRAWERS[name]();
}

function linked(on, text) {
  const tag = byId("link");
  if (tag.textContent !== text) tag.textContent = text;
  tag.dataset.state = on ? "on" : "off";
}

function drawCluster() {
  const parts = [`supervisor ${state.supervisor} (${state.version})`];
  if (!state.leading) parts.push("stands by: another supervisor leads, or nobody does");
  else parts.push(`epoch ${state.epoch}`, `${Object.keys(state.nodes).length} nodes`);
  if (state.leading && !state.store_up) parts.push("the store is DOWN");
  if (!state.automation) parts.push("automation is OFF");
  byId("cluster").textContent = parts.join(" · ");
}

function drawChoice() {
  const select = byId("job-choice");
  select.replaceChildren(...Object.keys(state.jobs).map((name) => panels.element("option", { value: name, textContent: name, selected: name === job })));
  select.parentElement.hidden = Object.keys(state.jobs).length < 2;
  mark("job");
}

const JOB_ORDERS = { "save-and-stop": "Save at the next step boundary, then stop the job.", pause: "Save at the next step boundary and free the nodes until resume." };

function drawJob(item) {
  byId("job-title").textContent = item ? `Job ${item.job}: ${item.state}` : "Job: none";
  document.title = item ? `${item.job} ${item.state} – Regrow` : "Regrow";
  byId("job-reason").textContent = item?.reason ?? "";
  const buttons = !item || item.outcome ? [] : item.state === "paused" || item.state === "pausing" ? ["resume"] : ["pause", "save-and-stop"];
  const known = [...byId("job-buttons").children].map((button) => button.textContent);
  if (known.join() !== buttons.join()) {
    byId("job-buttons").replaceChildren(...buttons.map((name) => {
      const button = panels.element("button", { type: "button", textContent: name });
      button.addEventListener("click", () => orderJob(name));
      return button;
    }));
  }
  const facts = !item ? [] : [
    ["step", item.step], ["frontier", item.frontier], ["loss", item.loss === null ? "–" : item.loss.toFixed(4)],
    ["step time", item.step_seconds === null ? "–" : `${item.step_seconds.toFixed(3)} s`],
    ["generation", item.generation], ["mesh", item.mesh || "–"], ["workers", item.world_size], ["global batch", item.global_batch || "–"],
    ["goodput", percent(item.goodput)], ["ETTR", percent(item.ettr)], ["steps lost", item.lost_steps], ["restarts charged", item.restarts],
    ["failures per hour", item.failures_per_hour === null ? "–" : item.failures_per_hour.toPrecision(3)],
    ["checkpoint", item.checkpoint.step === null ? "none" : `step ${item.checkpoint.step}${item.checkpoint.verified_step === item.checkpoint.step ? ", verified" : ""}`],
  ];
  byId("job-facts").replaceChildren(...facts.map(([name, value]) => {
    const box = panels.element("div");
    box.append(panels.element("dt", { textContent: name }), panels.element("dd", { textContent: String(value) }));
    return box;
  }));
}

const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

function drawCharts() {
  const latest = new Map();
  for (const [step, , loss, seconds] of state.steps[job] ?? []) latest.set(step, [loss, seconds]);
  const points = [...latest].sort((a, b) => a[0] - b[0]);
  const marks = shown().generations.slice(1, 30).filter((item) => item.restore_step !== null).map((item) => [item.restore_step + 0.5, `g${item.number}`]);
  draw(byId("chart-loss"), points.map(([step, [loss]]) => [step, loss ?? NaN]), marks, "loss");
  // Reports that were held up while the leader changed arrive together: the gap between them is no step time.
  const times = points.map(([, [, seconds]]) => seconds).filter((seconds) => seconds > 0).sort((a, b) => a - b);
  const least = (times[times.length >> 1] ?? 0) / 20;
  draw(byId("chart-rate"), points.map(([step, [, seconds]]) => [step, seconds > least ? 1 / seconds : NaN]), marks, "steps per second");
}

// --- orders

async function post(path, what) {
  const answer = await fetch(path, { method: "POST", headers: headers() });
  if (answer.status === 401 || answer.status === 403) {
    const found = await problem(answer);
    const given = await askToken(`${what}: ${found}`);
    return given ? post(path, what) : notice(`${what}: not done, no token`);
  }
  if (!answer.ok) return notice(`${what} failed: ${await problem(answer)}`);
  return notice(`${what}: ordered`);
}

async function problem(answer) {
  try {
    const { error } = await answer.json();
    return [error.what, error.hint].filter(Boolean).join(" – ");
  } catch {
    return `status ${answer.status}`;
  }
}

function notice(text) {
  byId("notice").textContent = text;
}

const dialogs = new Map();

function ask(dialog) {
  if (dialogs.has(dialog)) return dialogs.get(dialog);
  const answer = new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => { dialogs.delete(dialog); resolve(dialog.returnValue); }, { once: true });
    dialog.showModal();
  });
  dialogs.set(dialog, answer);
  return answer;
}

async function askToken(why) {
  byId("token-why").textContent = why;
  byId("token-value").value = "";
  const answer = await ask(byId("token-dialog"));
  const value = byId("token-value").value.trim();
  byId("token-value").value = "";
  if (answer === "forget") { sessionStorage.removeItem(TOKEN); notice("The token is forgotten."); }
  if (answer !== "use" || !value) return false;
  sessionStorage.setItem(TOKEN, value);
  return true;
}

async function orderJob(name) {
  if (JOB_ORDERS[name]) {
    byId("confirm-title").textContent = `${name} ${job}?`;
    byId("confirm-text").textContent = JOB_ORDERS[name];
    if ((await ask(byId("confirm-dialog"))) !== "yes") return;
  }
  await post(`/v1/jobs/${encodeURIComponent(job)}/${name}`, `${name} ${job}`);
}

async function orderNode(node, name) {
  if (name === "drain") {
    byId("confirm-title").textContent = `drain ${node}?`;
    byId("confirm-text").textContent = "It gets no new work, and its jobs move off at their next checkpoint.";
    if ((await ask(byId("confirm-dialog"))) !== "yes") return;
  }
  await post(`/v1/nodes/${encodeURIComponent(node)}/${name}`, `${name} ${node}`);
  if (nodes.chosenNode() === node) await showNode(node);
}

// spoken: whether a screen reader tells of it ("polite"), or not ("off")
async function showNode(name, spoken = "polite") {
  const answer = await fetch(`/v1/nodes/${encodeURIComponent(name)}?readings=1`, { headers: headers() });
  if (name !== nodes.chosenNode()) return;
  byId("detail").setAttribute("aria-live", spoken);
  if (answer.ok) nodes.detail(byId("detail"), await answer.json(), orderNode);
  else byId("detail").replaceChildren(panels.element("p", { className: "bad", textContent: await problem(answer) }));
}

// --- begin

function theme(value) {
  if (value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  byId("theme").textContent = `Theme: ${value}`;
  sessionStorage.setItem(THEME, value);
}

function only(text) {
  byId("node-filter").value = text;
  nodes.setFilter(text);
  mark("legend");
}

const THEMES = ["auto", "light", "dark"];
theme(sessionStorage.getItem(THEME) ?? "auto");
byId("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(sessionStorage.getItem(THEME)) + 1) % THEMES.length]));
byId("token-open").addEventListener("click", () => askToken("Orders need a token with the role operate. It stays in this tab only."));
byId("node-filter").addEventListener("input", (event) => { nodes.setFilter(event.target.value); mark("legend"); });
byId("job-choice").addEventListener("change", (event) => {
  job = event.target.value;
  mark("job", "charts", "mesh", "timeline", "incidents", "checkpoints");
});
nodes.start(byId("grid"), (name) => showNode(name));
setInterval(() => {  // what GPUs read changes without a word to the page
  const name = nodes.chosenNode();
  if (name in state.nodes && !document.hidden && !byId("detail").contains(document.activeElement)) showNode(name, "off");
}, 5000);
setInterval(() => { if (job) mark("checkpoints", "timeline"); }, 5000);
listen();
