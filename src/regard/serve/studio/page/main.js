// Starts all panels, and shows the one that the fragment of the URL names.

import {$, showError} from "/page/dom.js";
import {loadChoices, refreshRuns} from "/page/state.js";
import * as train from "/page/train.js";
import * as generate from "/page/generate.js";
import * as inside from "/page/inside.js";
import * as compare from "/page/compare.js";
import * as presets from "/page/presets.js";

const panels = {train, generate, inside, compare, presets};
let started = false;

function showPanel(focus) {
  const hash = location.hash.slice(1);
  const name = Object.hasOwn(panels, hash) ? hash : "train";
  for (const panel of Object.keys(panels)) $(`panel-${panel}`).hidden = panel !== name;
  for (const link of $("nav").children)
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  document.title = `${$(`${name}-title`).textContent} – regard studio`;
  if (started) panels[name].onShow?.();
  if (focus) {
    window.scrollTo(0, 0);
    $("main").focus({preventScroll: true});
  }
}

addEventListener("hashchange", () => {
  if (location.hash !== "#main") showPanel(true);
});
showPanel(false);
try {
  const choices = await loadChoices();
  for (const panel of Object.values(panels)) panel.start(choices);
  await refreshRuns();
  started = true;
  showPanel(false);
} catch (error) {
  showError($("train-error"), error);
}
document.documentElement.dataset.ready = "true";
