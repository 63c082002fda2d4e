// Train: start, show, stop and resume the training of a run; the runs of the folder.

import {$, el, get, number, post, show, showError} from "/page/dom.js";
import {drawChart} from "/page/chart.js";
import {refreshRuns, shared, taskName} from "/page/state.js";
import {exampleText} from "/page/example.js";

const POLL = 700; // milliseconds between two polls of the training process
let suffix = ".txt", timer = null;
let selectedRun = null, progress = null; // the name of the run that is shown, and its progress
let latest = 0; // the number of the last poll; answers to earlier ones are not shown

export function start(choices) {
  $("recipe").replaceChildren(...choices.recipes.map(recipe => el("option", {}, recipe.name)));
  $("train-file").accept = [...choices.suffixes, "text/plain"].join(",");
  $("file-hint").textContent = `${choices.suffixes.join(", ")}; up to ${megabytes(choices.max_bytes)} MB`;
  const describeRecipe = () => {
    $("recipe-about").textContent = choices.recipes.find(r => r.name === $("recipe").value)?.about ?? "";
    if (source() === "recipe") $("train-name").value = unusedName($("recipe").value);
  };
  $("recipe").addEventListener("change", describeRecipe);
  for (const radio of document.getElementsByName("source")) radio.addEventListener("change", () => {
    $("text-source").hidden = source() !== "text";
    $("recipe-source").hidden = source() !== "recipe";
    $("model-field").hidden = source() !== "text";
    if (source() === "recipe") $("train-minutes").value = "";
    describeRecipe();
  });
  describeRecipe();
  $("train-text").addEventListener("input", () => { suffix = ".txt"; showSize(); });
  $("example").addEventListener("click", () => {
    $("train-text").value = exampleText();
    $("train-name").value = unusedName("example");
    suffix = ".txt";
    showSize();
  });
  $("train-file").addEventListener("change", readFile);
  $("train-form").addEventListener("submit", submit);
  $("stop").addEventListener("click", stop);
  $("resume").addEventListener("click", () => resume(selectedRun));
  $("longer").addEventListener("click", () => resume(selectedRun, 2 * progress.step));
  document.addEventListener("runs", showRuns);
  addEventListener("resize", () => progress && draw(progress));
}

export function onShow() {
  if (shared.training.name && !selectedRun) selectRun(shared.training.name);
  else if (progress) draw(progress);
}

const source = () => document.querySelector("input[name=source]:checked").value;
const bytes = text => new Blob([JSON.stringify(text)]).size;

function unusedName(base) {
  const names = shared.runs.map(run => run.name);
  let name = base, n = 2;
  while (names.includes(name)) name = `${base}-${n++}`;
  return name;
}

function showSize() {
  const text = $("train-text").value, size = bytes(text);
  const lines = text ? text.split("\n").length : 0;
  $("text-size").textContent = text ? `${number(text.length)} characters, ${number(lines)} lines` : "empty";
  showError($("train-error"), size > shared.choices.max_bytes ? tooLarge(size) : null);
}

const megabytes = size => (size / 1e6).toFixed(1);
const tooLarge = size => new Error(`the text has ${megabytes(size)} MB, and the page accepts up to ${megabytes(shared.choices.max_bytes)} MB; ` +
  "train larger files on the command line: regard train FILE");

async function readFile() {
  const file = $("train-file").files[0];
  if (!file) return;
  if (file.size > shared.choices.max_bytes) return showError($("train-error"), tooLarge(file.size));
  try {
    $("train-text").value = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    return showError($("train-error"), new Error(`${file.name} is not UTF-8 text`));
  }
  const [, base, ending] = file.name.match(/^(.*?)(\.[^.]*)?$/);
  suffix = shared.choices.suffixes.includes(ending) ? ending : ".txt";
  $("train-name").value = unusedName(base.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 60) || "my-text");
  showSize();
}

async function submit(event) {
  event.preventDefault();
  showError($("train-error"), null);
  const name = $("train-name").value.trim();
  const settings = $("train-settings").value.trim().split(/\s+/).filter(Boolean);
  if ($("train-minutes").value && !settings.some(word => word.startsWith("minutes=")))
    settings.push(`minutes=${$("train-minutes").value}`);
  const body = {name, settings};
  if (source() === "recipe") body.recipe = $("recipe").value;
  else {
    const text = $("train-text").value;
    if (bytes(text) > shared.choices.max_bytes) return showError($("train-error"), tooLarge(bytes(text)));
    Object.assign(body, {text, suffix});
    if ($("train-model").value) settings.push(`model.preset=${$("train-model").value}`);
  }
  $("train-button").disabled = true;
  try {
    shared.training = await post("/studio/train", body);
    selectRun(name);
    if (matchMedia("(max-width: 900px)").matches) $("live").scrollIntoView();
  } catch (error) {
    showError($("train-error"), error);
    $("train-button").disabled = false;
  }
}

async function stop() {
  $("stop").disabled = true;
  try {
    shared.training = await post("/studio/stop", {});
  } catch (error) {
    showError($("train-error"), error);
  }
  poll();
}

async function resume(name, steps) {
  try {
    showError($("train-error"), null);
    shared.training = await post("/studio/resume", steps ? {name, steps} : {name});
    selectRun(name);
  } catch (error) {
    showError($("train-error"), error);
  }
}

// --- a run and its curve

export function selectRun(name) {
  selectedRun = name;
  progress = null;
  $("chart").replaceChildren();
  $("samples").replaceChildren();
  $("numbers").replaceChildren();
  $("samples-title").hidden = true;
  poll();
}

async function poll() {
  clearTimeout(timer);
  const name = selectedRun, begun = performance.now(), request = ++latest;
  let training = shared.training, run = null, answered = true;
  try {
    training = shared.training = await get("/studio/training");
    const exists = () => shared.runs.some(entry => entry.name === name);
    if (!exists()) await refreshRuns();
    if (exists()) run = await get(`/studio/runs/${encodeURIComponent(name)}`);
  } catch (error) {
    answered = false;
    showError($("train-error"), error);
  }
  if (request !== latest) return;
  if (run) draw(progress = run);
  showState(name, run, training);
  // the longer the log, the longer an answer takes, and the less often it is polled
  const pause = answered ? Math.max(POLL, 5 * (performance.now() - begun)) : 10 * POLL;
  if (training.running) timer = setTimeout(poll, pause);
  else await refreshRuns().catch(error => showError($("train-error"), error));
}

function showState(name, run, training) {
  const isThisRun = training.name === name, running = training.running && isThisRun;
  $("live-title").textContent = name;
  $("live-actions").hidden = !run && !running;
  $("stop").hidden = !running;
  $("stop").disabled = Boolean(training.stopping);
  const finished = run?.finished;
  $("resume").hidden = !run || training.running || finished;
  $("longer").hidden = !run || training.running || !finished || !run.loss.length;
  $("train-button").disabled = training.running;
  const seconds = running ? `${Math.round(training.seconds)} s` : "";
  let status = "", step = "";
  if (running && training.stopping) status = "Saving a checkpoint …";
  else if (running && !run) [status, step] = ["Preparing …", `${lastLine(training.output)} ${seconds}`];
  else if (running) [status, step] = ["Training.", `Step ${number(run.step)} of about ${number(run.steps)}, ${seconds}`];
  else if (isThisRun && training.message) status = training.message;
  else if (run) status = finished ? (run.loss.length ? `Trained for ${number(run.step)} steps.` : "Fitted without gradients, so there are no steps.") : `Stopped at step ${number(run.step)} of ${number(run.steps)}.`;
  setText($("live-status"), isThisRun && training.failed ? "" : status);
  $("live-step").textContent = step;
  if (isThisRun && training.failed) showError($("train-error"), new Error(training.message));
  $("live-progress").hidden = !running;
  if (run) $("live-progress").value = Math.min(1, run.step / run.steps);
  else $("live-progress").removeAttribute("value");
  $("output-details").hidden = !(isThisRun && training.output);
  $("output").textContent = isThisRun ? training.output : "";
  const chip = $("chip");
  chip.hidden = !training.running;
  chip.textContent = training.running ? `training ${training.name}` : "";
}

// Screen readers read a status when it changes, not every time it is written.
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const lastLine = text => text.trim().split("\n").at(-1).slice(0, 100);

function draw(run) {
  const finite = points => (points ?? []).filter(([, value]) => value !== null);
  drawChart($("chart"), finite(run.loss), finite(run.validation.loss));
  const metrics = Object.entries(Object.keys(run.metrics).length ? run.metrics
    : Object.fromEntries(Object.entries(run.validation).map(([key, points]) => [key, points.at(-1)[1]])));
  $("numbers").replaceChildren(...(metrics.length ? [el("h3", {}, "On validation data"), el("dl", {class: "metrics"},
    ...metrics.slice(0, 6).map(([key, value]) => el("div", {}, el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, show(value)))))] : []));
  $("samples-title").hidden = !run.samples.length;
  $("samples").replaceChildren(...run.samples.map(sample =>
    el("li", {}, el("span", {class: "step"}, `step ${number(sample.step)}`), el("span", {class: "text"}, sample.text))));
}

function showRuns() {
  $("no-runs").hidden = shared.runs.length > 0;
  $("runs").hidden = !shared.runs.length;
  $("runs").tBodies[0].replaceChildren(...shared.runs.map(run => {
    const training = shared.training.running && shared.training.name === run.name;
    const state = run.problem ?? (training ? "training" : run.ready ? "ready" : "no weights yet");
    const action = (label, onclick) => el("button", {type: "button", class: "quiet", "aria-label": `${label} ${run.name}`, onclick}, label);
    return el("tr", {}, el("th", {scope: "row"}, run.name), el("td", {}, taskName(run) ?? "–"), el("td", {}, run.model ?? "–"), el("td", {}, state),
      el("td", {class: "buttons"}, run.problem || !run.task ? null : action("Show", () => { selectRun(run.name); $("live").scrollIntoView({block: "nearest"}); }),
        run.ready && run.methods.length ? action("Use", () => use(run)) : null));
  }));
}

function use(run) {
  const select = $("generate-run");
  select.value = run.name;
  select.dispatchEvent(new Event("change", {bubbles: true})); // to `document`, as if the user had chosen it
  location.hash = "#generate";
}
