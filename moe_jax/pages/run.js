const FIRST = ["loss", "reward", "reward_margin", "reward_accuracy", "learning_rate", "tokens_per_second", "grad_norm",
  "completions/mean_length", "kl", "entropy", "max_mean_expert_load", "router_entropy"];
const KINDS = {grpo: "Reinforcement learning of", preference: "Preferences of"};
const MOST_SAMPLES = 64, SMOOTHING = 10, POLL = 2000;

let run = null, records = [], version = 0;
const charts = new Map();

async function lines(file, first, count) {
  const answer = await fetch(`/lines?file=${file}&first=${first}&count=${count}`);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  // Python writes NaN, which JSON does not have.
  const parsed = line => {
    try { return JSON.parse(line); } catch { return JSON.parse(line.replace(/-?\b(NaN|Infinity)\b/g, "null")); }
  };
  return (await answer.text()).split("\n").filter(Boolean).map(parsed);
}

async function poll() {
  try {
    const answer = await fetch("/run");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    run = await answer.json();
    const [found, number] = run.files.metrics;
    // A resumed run has replaced the file.
    if (found !== version) records = [];
    version = found;
    const before = records.length;
    while (records.length < number) records.push(...await lines("metrics", records.length, 2000));
    describe();
    if (records.length !== before) curves();
    await Promise.all([loads, samples].map(each => each.follow(run.files[each.file])));
  } catch (error) {
    state(`no answer from moe-jax watch (${error.message})`, true);
  }
  setTimeout(poll, POLL);
}

function state(text, bad) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "soft";
}

function describe() {
  const settings = run.settings ?? {}, last = records.at(-1), steps = settings.steps;
  const kind = Object.keys(KINDS).find(each => each in settings);
  byId("name").textContent = document.title = run.name;
  byId("kind").textContent = run.settings ? `${kind ? KINDS[kind] : "Fine-tuning of"} ${settings.model}` : "no settings.json";
  if (!last) return state(run.settings ? "no step yet: it loads or compiles" : "the run has not written anything yet");
  // The median: the first step of a process compiles.
  const times = records.slice(-20).map(each => each.step_time).filter(Boolean).sort((a, b) => a - b);
  const seconds = times[times.length >> 1], left = steps - last.step;
  const silent = run.idle > Math.max(60, 10 * (seconds ?? 60)) && left > 0;
  const ago = `last step ${duration(run.idle)} ago${silent ? ": does it still run?" : ""}`;
  state(left <= 0 ? "all steps are done" : ago, silent);
  byId("progress").value = steps ? last.step / steps : 0;
  const time = left <= 0 ? "0 s" : seconds && steps && !silent ? duration(seconds * left) : "unknown";
  const figures = {step: steps ? `${last.step} of ${steps}` : last.step, loss: short(last.loss), reward: last.reward,
    "learning rate": last.learning_rate, "tokens/s": last.tokens_per_second, "time left": time};
  byId("figures").replaceChildren(...Object.entries(figures).filter(([, value]) => value != null).map(([name, value]) =>
    element("div", {class: "card"}, element("span", {class: "soft"}, name),
      element("b", {}, typeof value === "number" ? short(value) : value))));
  if (byId("settings").rows.length) return;
  const rows = Object.entries(settings).map(([name, value]) =>
    element("tr", {}, element("th", {}, name), element("td", {}, typeof value === "string" ? value : JSON.stringify(value))));
  byId("settings").replaceChildren(...rows);
}

function curves() {
  const names = new Set(records.flatMap(Object.keys).filter(name => name !== "step" && !name.startsWith("eval_")));
  const all = [...FIRST.filter(name => names.has(name)), ...[...names].filter(name => !FIRST.includes(name)).sort()];
  for (const name of all) {
    const of = key => records.filter(each => Number.isFinite(each[key])).map(each => [each.step, each[key]]);
    const points = of(name), held = of(`eval_${name}`);
    if (!points.length) continue;
    if (!charts.has(name)) {
      charts.set(name, new Chart(name.replaceAll("_", " ") + (held.length ? ", held out in orange" : ""), "step"));
      byId(FIRST.includes(name) ? "curves" : "others").append(charts.get(name).node);
    }
    const jumps = name !== "learning_rate" && points.length > SMOOTHING;
    charts.get(name).draw([{points: jumps ? smoothed(points, SMOOTHING) : points, kind: ""},
      ...(jumps ? [{points, kind: "pale"}] : []), ...(held.length ? [{points: held, kind: "second", dots: true}] : [])]);
  }
  byId("more").hidden = !byId("others").children.length;
}

// A slider over the records of a file, in the panel `id`. It stays at the newest one until it is moved.
class Slider {
  constructor(file, id, why, show) {
    Object.assign(this, {file, id, why, show, number: 0, shown: -1, version: 0});
    this.input = byId(`${id}-step`);
    this.input.addEventListener("input", () => this.go(Number(this.input.value)));
  }

  async follow([version, number]) {
    byId(this.id).hidden = !number;
    byId(`no-${this.id}`).textContent = number ? "" : this.why;
    const atEnd = Number(this.input.value) >= this.number - 1;
    if (this.version !== version) this.shown = -1;
    [this.version, this.number] = [version, number];
    this.input.max = Math.max(0, number - 1);
    if (number && (atEnd || this.shown < 0)) await this.go(number - 1);
  }

  async go(index) {
    this.input.value = index;
    if (this.shown === index) return;
    this.shown = index;
    const [record] = await lines(this.file, index, 1);
    // A later choice has overtaken this answer.
    if (!record || this.shown !== index) return;
    byId(`${this.id}-label`).textContent = `step ${record.step}`;
    this.show(record);
  }
}

// Colors of viridis, from 0 to twice an even share.
const COLORS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function color(share) {
  const place = Math.min(share / 2, 1) * 4, i = Math.min(Math.floor(place), 3);
  return COLORS[i].map((from, k) => from + (COLORS[i + 1][k] - from) * (place - i));
}

function paint(canvas, rows) {
  [canvas.height, canvas.width] = [rows.length, rows[0].length];
  const image = new ImageData(canvas.width, canvas.height);
  rows.flat().forEach((share, i) => image.data.set([...color(share), 255], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

let heat = null;
const loads = new Slider("expert_load", "load", "No load of experts is recorded: the model is dense, the loss is your own, or "
  + "the run is by an earlier version.", record => {
  const shares = record.expert_load.map(row => {
    const mean = row.reduce((a, b) => a + b, 0) / row.length;
    return row.map(count => mean ? count / mean : 1);
  });
  heat = {layers: record.layers, shares};
  byId("axes").textContent = `layers ${record.layers[0]} to ${record.layers.at(-1)} from top to bottom, `
    + `experts 0 to ${shares[0].length - 1} from left to right`;
  byId("heat").style.height = `${Math.min(28 * shares.length, 520)}px`;
  paint(byId("heat"), shares);
});

byId("heat").addEventListener("pointermove", event => {
  const box = byId("heat").getBoundingClientRect();
  const [row, column] = [(event.clientY - box.top) / box.height * heat.shares.length, (event.clientX - box.left) / box.width
    * heat.shares[0].length].map(Math.floor);
  const share = heat.shares[row]?.[column];
  byId("cell").textContent = share === undefined ? "" : `layer ${heat.layers[row]}, expert ${column}: ${share.toFixed(2)}`;
});

let playing = null;
async function play() {
  if (playing) return stop();
  byId("play").textContent = "Pause";
  // At most 200 pictures, a tenth of a second each.
  const stride = Math.ceil(loads.number / 200), from = loads.shown >= loads.number - 1 ? 0 : loads.shown;
  const token = playing = {};
  for (let i = from; i < loads.number && playing === token; i += stride) {
    await Promise.all([loads.go(i), new Promise(done => setTimeout(done, 100))]);
  }
  if (playing === token) stop();
}
function stop() {
  playing = null;
  byId("play").textContent = "Play";
}
byId("play").addEventListener("click", play);

const samples = new Slider("samples", "samples", "No samples are recorded: finetune writes them with --sample-prompts, grpo "
  + "always.", record => {
  const text = value => typeof value === "string" ? value : JSON.stringify(value);
  byId("texts").replaceChildren(...record.samples.slice(0, MOST_SAMPLES).map(sample => {
    const {prompt, text: answer, ...others} = sample;
    const facts = Object.entries(others).filter(([, value]) => value !== null)
      .map(([name, value]) => `${name} ${typeof value === "number" && !Number.isInteger(value) ? short(value) : text(value)}`);
    return element("div", {class: "card"}, element("div", {class: "text soft"}, text(prompt)),
      element("div", {class: "text"}, answer), element("div", {class: "soft"}, facts.join(" · ")));
  }));
});

paint(byId("scale"), [Array.from({length: 120}, (_, i) => i / 60)]);
poll();
