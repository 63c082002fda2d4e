// The state that all panels share: the runs of the folder and the choices of the library.

import {$, el, get} from "/page/dom.js";

export const shared = {runs: [], training: {running: false}, choices: null};

export const taskName = run => run.task?.replaceAll("_", " ") ?? run.model;

const writesText = run => run.methods.some(method => ["generate", "translate", "chat"].includes(method));
export const generates = name => shared.runs.some(run => run.name === name && writesText(run));

export const translates = name => shared.runs.some(run => run.name === name && run.methods.includes("translate"));

const find = name => shared.runs.find(run => run.name === name);

// Whether a run predicts the next token of the text that it reads.
export const continues = name => find(name)?.methods.some(method => ["generate", "chat"].includes(method)) ?? false;

// Whether a run has a chat template, into which a prompt can be put as a message.
export const hasTemplate = name => continues(name) && Boolean(find(name).has_template);

// Whether a run has curves and metrics; a checkpoint of another library has none.
export const hasProgress = name => Boolean(find(name)?.task);

// The names of the texts that a run reads, such as premise and hypothesis.
export const inputsOf = name => find(name)?.inputs ?? ["text"];

const capitalize = text => text.charAt(0).toUpperCase() + text.slice(1);

// Shows the field `${id}-second` if one of the runs reads two texts, and labels both fields after these texts.
export function showTextFields(id, runs, label) {
  const pairs = runs.map(inputsOf).filter(inputs => inputs.length > 1);
  const names = n => capitalize([...new Set(pairs.map(inputs => inputs[n]))].join(" / "));
  document.querySelector(`label[for=${id}]`).textContent = pairs.length ? names(0) : label;
  document.querySelector(`label[for=${id}-second]`).textContent = pairs.length ? names(1) : "";
  $(`${id}-second-field`).hidden = !pairs.length;
}

// The texts that a run reads, from the field `id` and the field `${id}-second`.
export function typedTexts(id, name) {
  const inputs = inputsOf(name), texts = [$(id).value, $(`${id}-second`).value].slice(0, inputs.length);
  if (inputs.length > 1 && !texts.every(text => text.trim())) throw new Error(`this run reads ${inputs.join(" and ")}; fill in both fields`);
  return texts;
}

// The body of /predict for what is typed in the field `id`: numbers of a series, a text, or two texts.
export function predictionBody(name, id) {
  if (find(name)?.data_kind === "series") return {model: name, series: $(id).value.trim().split(/[\s,;]+/).filter(Boolean).map(Number)};
  const texts = typedTexts(id, name);
  return {model: name, top: 5, input: texts.length > 1 ? [texts] : texts[0]};
}

// What to type for a run that predicts.
export function predictionHint(name) {
  const {data_kind: kind, inputs = ["text"]} = find(name) ?? {};
  if (["images", "captions"].includes(kind)) return "This run reads images, which the page does not take; use the command line: regard predict RUN FILE.";
  if (kind === "series") return "This run forecasts a series of numbers. Type its last values, separated by spaces, and press Predict.";
  if (inputs.length > 1) return `This run predicts from ${inputs.join(" and ")}. Fill in both fields and press Predict.`;
  return "This run predicts; it does not generate text. Type an input and press Predict.";
}

export async function refreshRuns() {
  const answer = await get("/studio/runs");
  shared.runs = answer.runs;
  shared.training = answer.training;
  $("folder").textContent = answer.folder;
  for (const select of document.querySelectorAll("select[data-runs]")) fillRuns(select);
  document.dispatchEvent(new CustomEvent("runs"));
}

function fillRuns(select) {
  const ready = shared.runs.filter(run => run.ready);
  const names = ready.map(run => run.name);
  const selected = select.value;
  if (select.options.length && names.join("/") === [...select.options].map(option => option.value).join("/")) return;
  select.replaceChildren(...(ready.length
    ? ready.map(run => el("option", {value: run.name}, `${run.name} (${taskName(run)})`))
    : [el("option", {value: ""}, "no trained run yet")]));
  const second = select.id === "compare-b" ? names[1] : names[0];
  select.value = select.dataset.chosen && names.includes(selected) ? selected : second ?? names[0] ?? "";
}

document.addEventListener("change", ({target}) => { target.dataset.chosen = "true"; }); // by the user

export async function loadChoices() {
  shared.choices = await get("/studio/choices");
  return shared.choices;
}
