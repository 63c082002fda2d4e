// Look inside: attention maps, the next-token table and the figures of the lectures.

import {$, el, number, post, showError, table} from "/page/dom.js";
import {continues, showTextFields, typedTexts} from "/page/state.js";

let figures = [], latest = 0; // latest: the number of the last request; answers to earlier ones are not shown

export function start(choices) {
  figures = choices.figures;
  $("figure-name").replaceChildren(...figures.map(figure => el("option", {value: figure.name}, `${figure.name} [${figure.topics.join(", ")}]`)));
  $("figure-name").addEventListener("change", describeFigure);
  $("figure-name").value = "temperature";
  describeFigure();
  $("inside-run").addEventListener("change", onShow);
  document.addEventListener("runs", onShow);
  $("inside-form").addEventListener("submit", event => { event.preventDefault(); inspect(); });
  $("figure-form").addEventListener("submit", event => { event.preventDefault(); drawFigure(); });
}

export const onShow = () => showTextFields("inside-text", [$("inside-run").value], "Text");

const selectedFigure = () => figures.find(figure => figure.name === $("figure-name").value);

function describeFigure() {
  const {summary, model, text} = selectedFigure();
  const needs = [model === "required" && "a run", text === "required" && "a text"].filter(Boolean);
  $("figure-about").textContent = summary + (needs.length ? ` It needs ${needs.join(" and ")}.` : "");
}

async function inspect() {
  const name = $("inside-run").value;
  if (!name) return showError($("attention-error"), new Error("there is no trained run yet; train one first"));
  const request = ++latest;
  await Promise.all([showAttention(name, request), showNext(name, $("inside-text").value, request)]);
}

async function showAttention(name, request) {
  showError($("attention-error"), null);
  $("attention-status").textContent = "Reading the text …";
  try {
    const [text, second_text = null] = typedTexts("inside-text", name);
    const {page, unknown} = await post("/studio/attention", {name, text, second_text});
    if (request !== latest) return;
    $("attention").src = page;
    $("attention").hidden = false;
    $("attention-empty").hidden = true;
    $("attention-status").textContent = unknown.length ? `Not in the vocabulary of this run, read as unknown: ${unknown.slice(0, 8).join(" ")}` : "";
  } catch (error) {
    if (request !== latest) return;
    $("attention").hidden = true;
    $("attention-status").textContent = "";
    showError($("attention-error"), error);
  }
}

async function showNext(name, text, request) {
  showError($("next-error"), null);
  if (!continues(name)) {
    $("next-table").replaceChildren(el("p", {class: "empty"}, "This run does not predict the next token of the text, so there is no table."));
    return;
  }
  try {
    const answer = await post("/studio/figure", {figure: "next-token", name, text});
    if (request !== latest) return;
    $("next-table").replaceChildren(...answer.tables.map(shadedTable), numberList(answer.numbers));
  } catch (error) {
    if (request !== latest) return;
    $("next-table").replaceChildren(el("p", {class: "empty"}, "No table for this run."));
    showError($("next-error"), error);
  }
}

function shadedTable({header, rows, shades}) {
  const result = table(header, rows, {class: "shaded"});
  rows.forEach((row, r) => row.forEach((_, c) => {
    const shade = shades?.[r]?.[c] ?? 0;
    if (shade > 0.01) result.tBodies[0].rows[r].cells[c].style.setProperty("--shade", `${Math.round(shade * 45)}%`);
  }));
  return result;
}

const numberList = values => el("dl", {class: "metrics"}, ...Object.entries(values).map(([key, value]) =>
  el("div", {}, el("dt", {}, key), el("dd", {}, number(value)))));

async function drawFigure() {
  const {name, model, text} = selectedFigure();
  const body = {figure: name};
  if (model !== "none" && $("inside-run").value) body.name = $("inside-run").value;
  if (text !== "none" && $("inside-text").value) body.text = $("inside-text").value;
  // a figure for which run and text are both optional takes both or none
  if (model === "optional" && text === "optional" && !body.text) delete body.name;
  showError($("figure-error"), null);
  $("figure-status").textContent = "Drawing …";
  $("figure-button").disabled = true;
  try {
    const answer = await post("/studio/figure", body);
    const {title, caption, tables} = answer;
    const content = tables.length
      ? [el("h3", {}, title), el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": title}, ...tables.map(shadedTable)), el("p", {}, caption), numberList(answer.numbers)]
      : [el("img", {class: "figure", alt: `${title}. ${caption}`, src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(answer.svg)}`})];
    $("figure").replaceChildren(...content,
      el("details", {}, el("summary", {}, "As text"), el("pre", {tabindex: "0", "aria-label": `${title} as text`}, answer.text)));
    $("figure-status").textContent = "";
  } catch (error) {
    $("figure-status").textContent = "";
    $("figure").replaceChildren();
    showError($("figure-error"), error);
  }
  $("figure-button").disabled = false;
}
