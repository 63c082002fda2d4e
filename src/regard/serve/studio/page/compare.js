// Compare: two runs continue, answer or translate the same prompt with the same seed, or predict from the same texts.

import {$, complete, el, get, post, showError, table, visible} from "/page/dom.js";
import {continues, generates, hasProgress, hasTemplate, predictionBody, showTextFields} from "/page/state.js";
import {firstPrediction, percent, promptText} from "/page/generate.js";

let running = null;

export function start() {
  $("compare-form").addEventListener("submit", compare);
  for (const id of ["compare-a", "compare-b"]) $(id).addEventListener("change", onShow);
  document.addEventListener("runs", onShow);
}

// Shows the fields that the two runs need.
export function onShow() {
  const runs = [$("compare-a").value, $("compare-b").value];
  showTextFields("compare-prompt", runs, "Prompt");
  $("compare-chat-field").hidden = !runs.some(hasTemplate);
}

async function compare(event) {
  event.preventDefault();
  running?.abort();
  running = new AbortController();
  await Promise.all(["a", "b"].map(side => show(side, running.signal)));
}

async function show(side, signal) {
  const run = $(`compare-${side}`).value, card = document.querySelector(`#compare-out [data-side=${side}]`);
  const output = card.querySelector("output"), error = card.querySelector(".error"), prompt = $("compare-prompt").value;
  card.querySelector("h2").textContent = run || "No run";
  showError(error, run ? null : new Error("there is no trained run yet; train one first"));
  if (!run) return;
  output.classList.remove("empty");
  output.setAttribute("aria-busy", "true");
  output.replaceChildren();
  card.querySelector(".numbers").replaceChildren();
  card.querySelector(".next").replaceChildren();
  const chat = hasTemplate(run) && $("compare-chat").checked;
  const body = {model: run, seed: +$("compare-seed").value || 0,
    sampler: [`temperature=${$("compare-temperature").value || 1}`, `top_p=${$("compare-top-p").value || 1}`]};
  try {
    if (generates(run)) {
      output.append(promptText(run, prompt, chat));
      for await (const text of complete({...body, prompt, max_tokens: +$("compare-tokens").value || 1}, chat, signal)) output.append(text);
      const {tokens, stages} = await post("/studio/distribution", {...body, text: prompt, chat, top: 8}, signal);
      const title = chat ? "First token of the response" : continues(run) ? "Next token after the prompt" : "First token of the translation";
      card.querySelector(".next").replaceChildren(el("h3", {}, title), table(["token", "model", "after the samplers"],
        tokens.map((token, n) => [visible(token.piece), percent(stages[0].probabilities[n]), percent(stages.at(-1).probabilities[n])])));
    } else {
      const answer = await post("/predict", predictionBody(run, "compare-prompt"), signal);
      output.append(firstPrediction(answer));
    }
    if (hasProgress(run)) await showNumbers(card, run, signal);
  } catch (problem) {
    if (signal.aborted) return; // a later comparison writes to the card
    showError(error, problem);
  }
  output.removeAttribute("aria-busy");
}

async function showNumbers(card, run, signal) {
  const {metrics, step, model} = await get(`/studio/runs/${encodeURIComponent(run)}`, signal);
  const rows = Object.entries({...metrics, steps: step, ...model}).map(([key, value]) => [key.replaceAll("_", " "), value]);
  card.querySelector(".numbers").replaceChildren(el("h3", {}, "Validation and size"), table([], rows));
}
