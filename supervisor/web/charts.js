// Curves as inline SVG: one series over steps, with dashed lines where a generation began.

const WIDTH = 560, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 26;
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function ticks(low, high, most) {
  const raw = (high - low) / most;
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

const short = (value) => (Math.abs(value) >= 10000 ? value.toExponential(1) : String(Number(value.toPrecision(4))));

// points: [[step, value]], marks: [[step, text]]
export function draw(target, points, marks, label) {
  const known = points.filter(([, value]) => Number.isFinite(value));
  if (known.length === 0) {
    target.replaceChildren(Object.assign(document.createElement("p"), { className: "soft", textContent: "No steps with this value yet." }));
    return;
  }
  let lowX = known[0][0], highX = known[0][0], lowY = known[0][1], highY = known[0][1];
  for (const [x, y] of known) {
    lowX = Math.min(lowX, x); highX = Math.max(highX, x); lowY = Math.min(lowY, y); highY = Math.max(highY, y);
  }
  if (lowX === highX) { lowX -= 0.5; highX += 0.5; }
  if (lowY === highY) { lowY -= Math.abs(lowY) * 0.1 || 0.5; highY += Math.abs(highY) * 0.1 || 0.5; }
  const px = (x) => LEFT + ((WIDTH - LEFT - RIGHT) * (x - lowX)) / (highX - lowX);
  const py = (y) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * (y - lowY)) / (highY - lowY);
  const last = known[known.length - 1];
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${label}: ${short(last[1])} at step ${last[0]}` });
  for (const value of ticks(lowY, highY, 4)) {
    svg.append(make("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: py(value), y2: py(value) }));
    svg.append(make("text", { x: LEFT - 5, y: py(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const value of ticks(lowX, highX, 6)) {
    if (Number.isInteger(value)) svg.append(make("text", { x: px(value), y: HEIGHT - 8, "text-anchor": "middle" }, short(value)));
  }
  const named = [];
  for (const [step, text] of marks) {
    if (step < lowX || step > highX) continue;
    svg.append(make("line", { class: "mark", x1: px(step), x2: px(step), y1: TOP, y2: HEIGHT - BOTTOM }));
    if (named.some((x) => Math.abs(x - px(step)) < 8 * text.length + 4)) continue; // the line is there; two names would cover each other
    named.push(px(step));
    const late = px(step) > WIDTH - RIGHT - 8 * text.length;
    svg.append(make("text", { x: px(step) + (late ? -3 : 2), y: TOP + 9, "text-anchor": late ? "end" : "start" }, text));
  }
  svg.append(make("polyline", { class: "curve", points: known.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ") }));
  target.replaceChildren(svg);
}
