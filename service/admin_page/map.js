// The memory map: every frame and every swap slot a cell, kept up to date by the stream; what one of them is and holds.

import { byId, clock, count, duration, el, say } from "./dom.js";
import { Grid } from "./grid.js";
import { follow, view } from "./server.js";

const STATE_BITS = 15;
const IS_CACHED = 16;
const IS_CLEAN = 32;
const SHARED = 2;
const CLOSED = 5;

const FRAMES = [
  { name: "free", colour: "--frame-free", says: "holds nothing" },
  { name: "private", colour: "--frame-private", says: "mapped by one sequence" },
  { name: "shared", colour: "--frame-shared-2", says: "mapped by several sequences" },
  { name: "cached, inactive", colour: "--frame-inactive", says: "kept to be found again; goes first" },
  { name: "cached, active", colour: "--frame-active", says: "kept to be found again; found twice or more" },
  { name: "pinned", colour: "--frame-pinned", says: "held by a pin" },
  { name: "in copy", colour: "--frame-copying", says: "on its way to or from swap" },
];
const SLOTS = [
  { name: "free", colour: "--frame-free", says: "holds nothing" },
  { name: "of a sequence", colour: "--frame-private", says: "a page of a swapped sequence" },
  { name: "cached", colour: "--frame-active", says: "the only copy of a cached page" },
  { name: "clean copy", colour: "--slot-clean", says: "a frame has the same content" },
  { name: "in copy", colour: "--frame-copying", says: "on its way to or from a frame" },
  { name: "closed", colour: "--slot-closed", says: "no memory behind it yet" },
];
const SHADES = ["--frame-shared-2", "--frame-shared-3", "--frame-shared-5", "--frame-shared-9"]; // by holders
const HOVER_MS = 120;


function bytesOf(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

const indicesOf = (text) => new Uint32Array(bytesOf(text).buffer);

let states = new Uint8Array(0);
let shares = new Uint8Array(0);
let slots = new Uint8Array(0);
let counts = [];
let slotCounts = [];
let shownKind = -1; // of the legend: the state that is not faint
let told = null; // what the inspector shows: {frame} or {slot}
let onSequence = () => {};

function frameColour(i) {
  const state = states[i] & STATE_BITS;
  if (state !== SHARED) return state;
  const held = shares[i];
  return held < 3 ? SHARED : FRAMES.length + (held < 5 ? 1 : held < 9 ? 2 : 3);
}

const frameGrid = new Grid(byId("frames"), [...FRAMES.map((kind) => kind.colour), ...SHADES], frameColour);
const slotGrid = new Grid(byId("slots"), SLOTS.map((kind) => kind.colour), (i) => slots[i]);

// ---------------------------------------------------------------- the stream

function take(event) {
  if (event.kind === "whole") {
    states = bytesOf(event.states);
    shares = bytesOf(event.shares);
    slots = bytesOf(event.slot_states);
    frameGrid.resize(states.length);
    slotGrid.resize(slots.length);
    recount();
    if (shownKind >= 0) showKind(shownKind);
    frameGrid.paintAll();
    slotGrid.paintAll();
  } else {
    change(event);
  }
  say(byId("map-step"), `step ${count(event.step)}`);
  byId("frames").dataset.step = event.step;
  byId("swap").hidden = slots.length === 0;
  showCounts();
}

function change(event) {
  const at = indicesOf(event.at);
  const newStates = bytesOf(event.states);
  const newShares = bytesOf(event.shares);
  for (let k = 0; k < at.length; k++) {
    const i = at[k];
    counts[states[i] & STATE_BITS]--;
    counts[newStates[k] & STATE_BITS]++;
    states[i] = newStates[k];
    shares[i] = newShares[k];
    if (shownKind >= 0) frameGrid.marked[i] = (states[i] & STATE_BITS) === shownKind;
    frameGrid.paint(i);
  }
  const slotsAt = indicesOf(event.slots_at);
  const newSlots = bytesOf(event.slot_states);
  for (let k = 0; k < slotsAt.length; k++) {
    slotCounts[slots[slotsAt[k]]]--;
    slotCounts[newSlots[k]]++;
    slots[slotsAt[k]] = newSlots[k];
    slotGrid.paint(slotsAt[k]);
  }
  if (told?.frame !== undefined && at.includes(told.frame)) inspect(told.frame);
}

function recount() {
  counts = new Array(FRAMES.length).fill(0);
  slotCounts = new Array(SLOTS.length).fill(0);
  for (const state of states) counts[state & STATE_BITS]++;
  for (const state of slots) slotCounts[state]++;
}

// ---------------------------------------------------------------- the legend

const figures = FRAMES.map(() => el("span", { class: "figure" }));
const slotFigures = SLOTS.map(() => el("span", { class: "figure" }));

function makeLegend() {
  FRAMES.forEach((kind, i) => {
    const swatch = el("span", { class: `swatch frame-${i}`, "aria-hidden": "true" });
    const name = kind.name === "shared" ? "shared by 2, 3+, 5+, 9+" : kind.name;
    const button = el("button", { class: "kind", "aria-pressed": "false", title: `${kind.says}: show only these` });
    button.append(swatch, el("span", {}, name), figures[i]);
    button.addEventListener("click", () => showKind(shownKind === i ? -1 : i));
    byId("legend").append(el("li", {}, button));
  });
  SLOTS.forEach((kind, i) => {
    const swatch = el("span", { class: `swatch slot-${i}`, "aria-hidden": "true" });
    const item = el("span", { class: "kind", title: kind.says }, swatch, el("span", {}, kind.name), slotFigures[i]);
    byId("slot-legend").append(el("li", {}, item));
  });
}

/** Draw all faintly but the frames of one state; -1: draw all. */
function showKind(kind) {
  shownKind = kind;
  frameGrid.mark(kind < 0 ? null : Uint8Array.from(states, (state) => (state & STATE_BITS) === kind));
  slotGrid.mark(null);
  sayShown(kind < 0 ? "" : FRAMES[kind].name);
}

function sayShown(what) {
  byId("legend")
    .querySelectorAll("button")
    .forEach((button, i) => button.setAttribute("aria-pressed", String(i === shownKind)));
  byId("unmark").hidden = !what;
  say(byId("unmark"), `Only ${what}: show all`);
}

function showCounts() {
  figures.forEach((figure, i) => say(figure, count(counts[i])));
  slotFigures.forEach((figure, i) => {
    say(figure, count(slotCounts[i]));
    figure.closest("li").hidden = i === CLOSED && !slotCounts[i];
  });
}

/** Draw all faintly but the frames and slots that a sequence's pages are in. */
export async function showSequence(id) {
  const frames = new Uint8Array(states.length);
  const swapped = new Uint8Array(slots.length);
  for (let offset = 0; ; offset += 10_000) {
    const found = await view(`sequences/${encodeURIComponent(id)}/pagemap?limit=10000&offset=${offset}`);
    for (const page of found.pages) (page.tier === "frame" ? frames : swapped)[page.number] = 1;
    if (offset + 10_000 >= found.total) break;
  }
  shownKind = -1;
  frameGrid.mark(frames);
  slotGrid.mark(swapped);
  sayShown(`sequence ${id}`);
}

// ---------------------------------------------------------------- one frame

function words(i) {
  const state = FRAMES[states[i] & STATE_BITS];
  const held = shares[i] > 1 ? ` by ${shares[i] === 255 ? "255 or more" : shares[i]}` : "";
  const flags = [
    states[i] & IS_CACHED && (states[i] & STATE_BITS) < 3 ? "found by content" : "",
    states[i] & IS_CLEAN ? "copy in swap" : "",
  ].filter(Boolean);
  return `Frame ${i}: ${state.name}${held}${flags.length ? `, ${flags.join(", ")}` : ""}`;
}

function fact(name, value, title) {
  return [el("dt", {}, name), el("dd", title ? { title } : {}, value)];
}

async function showFrame(i) {
  told = { frame: i };
  say(byId("inspected"), words(i));
  byId("inspected").dataset.frame = i;
  const facts = await view(`frames/${i}`);
  if (told?.frame !== i) return;
  const owners = facts.owners.map((owner) =>
    owner.startsWith("pin ") || owner === "transfer"
      ? el("span", {}, owner)
      : el("button", { class: "link", onclick: () => onSequence(owner) }, owner),
  );
  byId("facts").replaceChildren(
    ...fact("owners", owners.length ? el("span", { class: "owners" }, ...owners) : "none"),
    ...fact("references", count(facts.references)),
    ...fact("tokens", count(facts.tokens), "positions that are filled"),
    ...fact("tenant", facts.tenant || "–", "who is charged"),
    ...fact("hash", facts.hash ?? "–"),
    ...fact("parent", facts.parent ?? "–", "hash of the page before"),
    ...fact("found", facts.hash ? `${count(facts.uses)} times` : "–"),
    ...fact("idle", duration(facts.idle_s)),
    ...fact("swap slot", facts.slot == null ? "none" : String(facts.slot)),
  );
  const lines = facts.history.toReversed().map((event) =>
    el("li", {}, el("time", {}, clock(event.ts)), el("b", {}, event.kind), el("span", {}, event.owner || "–")),
  );
  byId("history").replaceChildren(...(lines.length ? lines : [el("li", { class: "none" }, "nothing recorded")]));
  byId("about").hidden = false;
}

function inspect(i) {
  showFrame(i).catch((error) => say(byId("inspected"), error.message));
}

function showSlot(i) {
  told = { slot: i };
  say(byId("inspected"), `Slot ${i}: ${SLOTS[slots[i]].name} – ${SLOTS[slots[i]].says}`);
  byId("about").hidden = true;
}

function choose(grid, i) {
  if (i < 0) return;
  const other = grid === frameGrid ? slotGrid : frameGrid;
  other.select(-1);
  grid.select(i);
  if (grid === slotGrid) showSlot(i);
  else inspect(i);
}

/** Select a frame from elsewhere on the page. */
export function showFrameOnMap(i) {
  choose(frameGrid, i);
  byId("frames").focus();
}

// ---------------------------------------------------------------- mouse and keys

function hover(grid, describe) {
  const tip = byId("tip");
  let last = -1;
  let later = 0;
  grid.canvas.addEventListener("mousemove", (event) => {
    const i = grid.at(event);
    tip.hidden = i < 0;
    if (i < 0) return;
    const right = event.clientX > innerWidth - 280;
    tip.style.transform = `translate(${event.clientX + (right ? -270 : 14)}px, ${event.clientY + 14}px)`;
    if (i === last) return;
    last = i;
    clearTimeout(later);
    tip.replaceChildren(el("div", {}, describe(i)));
    if (grid === frameGrid) later = setTimeout(() => tellOwners(i), HOVER_MS);
  });
  const tellOwners = async (i) => {
    const facts = await view(`frames/${i}`).catch(() => null);
    if (facts === null || i !== last) return;
    tip.replaceChildren(
      el("div", {}, describe(i)),
      el("div", {}, facts.owners.length ? `of ${facts.owners.join(", ")}` : "of nobody"),
      el("div", {}, `${facts.tokens} tokens${facts.hash ? `, ${facts.hash}` : ""}`),
    );
  };
  grid.canvas.addEventListener("mouseleave", () => {
    tip.hidden = true;
    last = -1;
    clearTimeout(later);
  });
}

function listen(grid) {
  const box = grid.canvas;
  box.addEventListener("click", (event) => choose(grid, grid.at(event)));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return showKind(-1);
    const i = grid.step(event.key);
    if (i < 0) return;
    event.preventDefault();
    choose(grid, i);
  });
}

/** show(owner): what to do when somebody follows the owner of a frame. */
export function startMap(show, tellState) {
  onSequence = show;
  makeLegend();
  hover(frameGrid, words);
  hover(slotGrid, (i) => `Slot ${i}: ${SLOTS[slots[i]].name}`);
  listen(frameGrid);
  listen(slotGrid);
  byId("unmark").addEventListener("click", () => showKind(-1));
  follow("frames/stream?interval=0.5", take, tellState);
}
