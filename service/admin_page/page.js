// Starts the page: the figures on top, the map, the time lines, the tabs; asks for the key.

import { startCharts } from "./charts.js";
import { startControls, updateControls } from "./controls.js";
import { answered, byId, count, duration, milliseconds, poll, say, short, tell } from "./dom.js";
import { startMap } from "./map.js";
import { chooseByOwner, startSequences, updateSequences } from "./sequences.js";
import { onKeyNeeded, view } from "./server.js";
import { makeTabs } from "./tabs.js";

const TABLES_MS = 2000;

// ---------------------------------------------------------------- the key

onKeyNeeded(async (reason) => {
  const dialog = byId("key-dialog");
  say(byId("key-reason"), reason);
  const given = await answered(dialog);
  const key = byId("key").value;
  byId("key").value = "";
  return given === "yes" ? key.trim() : null;
});

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close(event.submitter?.value ?? "yes");
  });
}

// ---------------------------------------------------------------- figures

const percentOf = (part, whole) => (whole ? `${short((100 * part) / whole)} %` : "–");

function showFigures(now, since) {
  const { frames, slots, counters } = now;
  const figures = {
    "figure-memory": `${count(frames.active)} of ${count(frames.total)}`,
    "figure-free": count(frames.free),
    "figure-cached": count(frames.cached),
    "figure-saved": count(frames.saved),
    "figure-swap": slots.total ? `${count(slots.total - slots.free)} of ${count(slots.total)}` : "none",
    "figure-sequences": `${count(now.running)} / ${count(now.waiting)} / ${count(now.swapped)}`,
    "figure-tokens": since ? short(since.rate("generated_tokens")) : "–",
    "figure-ttft": since ? milliseconds(since.mean("ttft")) : "–",
    "figure-itl": since ? milliseconds(since.mean("itl")) : "–",
    "figure-hits": percentOf(counters.prefix_hit, counters.prefix_query),
    "figure-pressure": `${short(now.pressure.memory.some.avg10)} %`,
    "figure-preempted": count(counters.preempt),
  };
  for (const [id, text] of Object.entries(figures)) say(byId(id), text);
  say(byId("uptime"), `up ${duration(now.uptime_s)}`);
}

function showState(state) {
  const isLive = state === "live";
  byId("state").className = isLive ? "live" : "away";
  say(byId("state"), isLive ? "live" : state);
}

// ---------------------------------------------------------------- tabs

const updates = { ...makeTabs(), sequences: updateSequences, controls: updateControls };
const tabs = [...document.querySelectorAll("[role=tab]")];
let shown = "sequences";

const refresh = async () => {
  try {
    await updates[shown]();
  } catch (error) {
    tell(error.message, "refused");
  }
};

function show(tab) {
  shown = tab.dataset.tab;
  for (const each of tabs) {
    const isShown = each === tab;
    each.setAttribute("aria-selected", String(isShown));
    each.tabIndex = isShown ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !isShown;
  }
  refresh();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    show(next);
  });
}

startSequences(() => shown !== "sequences" && show(tabs[0]));
startControls();
startMap((owner) => chooseByOwner(owner).catch((error) => tell(error.message, "refused")), showState);
startCharts(showFigures, showState);
poll(() => Promise.all([updateSequences(), shown !== "sequences" && updates[shown]()]), TABLES_MS);
poll(async () => {
  const found = await view("config");
  const setting = (name) => found.settings.find((each) => each.name === name)?.value;
  say(byId("model"), setting("served_model_name")?.[0] ?? String(setting("model")).split("/").at(-1));
}, 60_000);
