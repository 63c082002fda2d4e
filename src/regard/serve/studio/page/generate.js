// Generate: sliders of samplers, the distribution after each, and the text.

import {$, complete, el, number, post, showError, visible} from "/page/dom.js";
import {continues, generates, hasTemplate, predictionBody, predictionHint, showTextFields, translates} from "/page/state.js";

let sliders = []; // of samplers, in the order in which they are applied; at `off`, a sampler changes nothing
let pending = null, generating = null, timer = null;

export function start(choices) {
  $("order").append(...choices.orders.map(order => el("option", {}, order)));
  sliders = choices.sliders;
  $("sliders").replaceChildren(...sliders.map(slider => {
    const id = `slider-${slider.name}`, value = el("output", {for: id}), {min, max, step} = slider;
    const input = el("input", {id, type: "range", min, max, step, value: slider.value});
    const write = () => {
      const off = +input.value === slider.off;
      value.textContent = off ? "off" : input.value;
      input.setAttribute("aria-valuetext", off ? `${input.value}, off` : input.value);
    };
    input.addEventListener("input", () => { write(); scheduleStages(); });
    write();
    return el("div", {class: "slider"}, el("label", {for: id}, labelOf(slider.name)), value, input);
  }));
  for (const id of ["generate-run", "prompt", "prompt-chat", "seed", "other-samplers", "order"])
    $(id).addEventListener("input", scheduleStages);
  $("generate-run").addEventListener("change", scheduleStages);
  $("generate-form").addEventListener("submit", generate);
  $("generate-stop").addEventListener("click", () => generating?.abort());
  document.addEventListener("runs", () => { if (!$("panel-generate").hidden) scheduleStages(); });
}

// top_p: "Top-p"
const labelOf = name => (name[0].toUpperCase() + name.slice(1)).replaceAll("_", "-");

export const onShow = scheduleStages;

// Shows the stages a moment after the last change.
function scheduleStages() {
  clearTimeout(timer);
  timer = setTimeout(showStages, 120);
}

export function sampling() {
  const sampler = sliders.filter(slider => +$(`slider-${slider.name}`).value !== slider.off)
    .map(slider => `${slider.name}=${$(`slider-${slider.name}`).value}`);
  sampler.push(...($("other-samplers").value.trim().match(/[a-z_0-9]+(=(\{[^}]*\}|\S+))?/g) ?? []));
  const body = {model: $("generate-run").value, sampler: sampler.length ? sampler : ["temperature=1"], seed: +$("seed").value || 0};
  if ($("order").value) body.order = $("order").value;
  return body;
}

const chats = run => hasTemplate(run) && $("prompt-chat").checked;

async function showStages() {
  const run = $("generate-run").value;
  if (!run || $("panel-generate").hidden) return;
  pending?.abort(); // its answer is about an earlier prompt or run
  $("generate-button").textContent = generates(run) ? "Generate" : "Predict";
  showTextFields("prompt", [run], "Prompt");
  $("prompt-chat-field").hidden = !hasTemplate(run);
  $("formatted").hidden = !chats(run);
  const hint = !generates(run) ? predictionHint(run) : translates(run) && !$("prompt").value.trim() ? "This run translates. Type a sentence for it." : null;
  if (hint) {
    $("stages").replaceChildren(el("p", {class: "empty"}, hint));
    return showError($("distribution-error"), null);
  }
  pending = new AbortController();
  try {
    const answer = await post("/studio/distribution", {...sampling(), text: $("prompt").value, chat: chats(run), top: 12}, pending.signal);
    showError($("distribution-error"), null);
    $("formatted-text").textContent = answer.formatted ?? "";
    drawStages(answer);
  } catch (error) {
    if (error.name !== "AbortError") showError($("distribution-error"), error);
  }
}

function drawStages({tokens, stages, vocab_size: size}) {
  const largest = Math.max(...stages.flatMap(stage => stage.probabilities), 1e-9);
  const head = stages.map((stage, n) => el("th", {scope: "col"}, el("span", {class: "stage"}, n ? `${n}. ${stage.sampler}` : stage.sampler),
    el("span", {class: "remaining"}, `${number(stage.remaining)} of ${number(size)} left, ${stage.bits.toFixed(2)} bits`)));
  const rows = tokens.map((token, row) => el("tr", {}, el("th", {scope: "row", class: "token"}, visible(token.piece)),
    ...stages.map((stage, n) => cell(stage.probabilities[row], largest, stage.removed[row], stages[n - 1]?.removed[row]))));
  const others = stages.map(stage => [Math.max(0, 1 - stage.probabilities.reduce((sum, p) => sum + p, 0)),
    stage.remaining === stage.removed.filter(removed => !removed).length]);
  rows.push(el("tr", {class: "rest"}, el("th", {scope: "row"}, "all others"), ...others.map(([p, removed]) => cell(p, 0, removed, true))));
  const result = el("table", {class: "stages"}, el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "token"), ...head)), el("tbody", {}, ...rows));
  result.style.minWidth = `${92 + 168 * stages.length}px`;
  $("stages").replaceChildren(result);
}

// A probability with its bar; at the sampler that removes the token, the word "removed".
function cell(probability, largest, removed, removedBefore) {
  const bar = el("span", {class: "bar", "aria-hidden": "true"}), newly = removed && !removedBefore;
  if (largest) bar.style.width = probability ? `max(1px, ${100 * probability / largest}%)` : 0;
  return el("td", {class: newly ? "removed" : null}, largest ? bar : null,
    el("span", {class: "percent"}, newly ? "removed" : percent(removed ? 0 : probability || Number.MIN_VALUE)));
}

export const percent = p => p === 0 ? "0" : p < 0.0005 ? "< 0.05 %" : `${(100 * p).toFixed(1)} %`;

// The prediction for the only input; that of a series is all its next values.
export const firstPrediction = ({predictions}) => predictionText(typeof predictions[0] === "number" ? predictions.map(number) : predictions[0]);

// A prediction as lines: classes with their probabilities, or any other value as text.
export function predictionText(value) {
  if (!Array.isArray(value)) return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
  if (value.length === 2 && typeof value[0] === "string" && typeof value[1] === "number") return `${value[0]}  ${percent(value[1])}`;
  return value.map(predictionText).join("\n");
}

// The prompt before its continuation; a translation and a response begin on a new line.
export const promptText = (run, prompt, chat) => el("span", {class: "prompt"}, continues(run) && !chat ? prompt : `${prompt}\n`);

async function generate(event) {
  event.preventDefault();
  const run = $("generate-run").value, output = $("generated"), prompt = $("prompt").value;
  showError($("generate-error"), run ? null : new Error("there is no trained run yet; train one first"));
  if (!run) return;
  generating?.abort();
  const controller = generating = new AbortController();
  $("generate-stop").hidden = false;
  output.classList.remove("empty");
  output.setAttribute("aria-busy", "true"); // screen readers read it when it is complete
  output.replaceChildren();
  try {
    if (generates(run)) {
      const chat = chats(run);
      output.append(promptText(run, prompt, chat));
      const body = {...sampling(), prompt, max_tokens: +$("tokens").value || 1};
      for await (const text of complete(body, chat, controller.signal)) output.append(text);
    } else {
      const answer = await post("/predict", predictionBody(run, "prompt"), controller.signal);
      output.append(firstPrediction(answer));
    }
  } catch (error) {
    if (error.name !== "AbortError") showError($("generate-error"), error);
  }
  if (controller !== generating) return; // a later generation writes to the output
  output.removeAttribute("aria-busy");
  $("generate-stop").hidden = true;
}
