// What is done to the server as a whole: watermarks, overcommit, sizes, caches, drain; and the audit.

import { attempt, byId, confirmed, count, onSubmit, say } from "./dom.js";
import { act, view } from "./server.js";

/** Fields of a form that are filled in, as numbers. */
function numbers(form) {
  const given = [...new FormData(form)].filter(([, value]) => value.trim() !== "");
  return Object.fromEntries(given.map(([name, value]) => [name, Number(value)]));
}

const DROPS = { 1: "the cached pages that nobody maps", 2: "the shadows of evicted pages", 3: "both" };

async function audit() {
  const found = await view("audit");
  const sums = `${count(found.total)} frames = ${count(found.free)} free + ${count(found.cached)} cached + ${count(found.active)} active`;
  byId("audit").className = found.balanced ? "good" : "bad";
  say(byId("audit"), found.balanced ? `Everything adds up at step ${count(found.step)}: ${sums}` : found.discrepancies.join("; "));
}

let modeShown = ""; // of overcommit, as it was when the page looked last

/** What is so now, in the fields that are empty, and in the choice that nobody has changed. */
export async function updateControls() {
  const now = await view("zoneinfo");
  const placeholders = {
    "set-watermarks": { min: now.min, low: now.low, high: now.high },
    "do-resize": { frames: now.managed, slots: now.slots_managed },
  };
  for (const [form, fields] of Object.entries(placeholders)) {
    for (const [name, value] of Object.entries(fields)) byId(form).elements[name].placeholder = String(value);
  }
  say(byId("overcommit-now"), now.overcommit);
  const { mode } = byId("set-overcommit").elements;
  if (!modeShown || mode.value === modeShown) mode.value = now.overcommit;
  modeShown = now.overcommit;
  say(byId("size-most"), `${count(now.present)} frames and ${count(now.slots_present)} slots`);
}

export function startControls() {
  onSubmit("set-watermarks", (form) => attempt("watermarks", () => act("watermarks", numbers(form))));
  onSubmit("set-overcommit", (form) => attempt("overcommit", () => act("overcommit", { mode: new FormData(form).get("mode") })));
  onSubmit("do-resize", async (form) => {
    const body = numbers(form);
    const what = Object.entries(body).map(([name, value]) => `${count(value)} ${name}`);
    if (!what.length) return;
    if (await confirmed(`Resize to ${what.join(" and ")}? Who has pages beyond that computes them again.`, "Resize")) {
      await attempt("resize", () => act("resize", body));
    }
  });
  onSubmit("do-drop", async (form) => {
    const level = Number(new FormData(form).get("level"));
    if (await confirmed(`Drop ${DROPS[level]}? The next prompts are computed in full.`, "Drop")) {
      await attempt("drop caches", () => act("page_cache/drop", { level }));
    }
  });
  onSubmit("do-drain", async (form) => {
    const body = numbers(form);
    const end = body.timeout_s === undefined ? "" : ` What still runs after ${body.timeout_s} s is ended.`;
    if (await confirmed(`Admit nothing more? This cannot be undone while the server runs.${end}`, "Drain")) {
      await attempt("drain", () => act("drain", body));
    }
  });
  byId("do-audit").addEventListener("click", () =>
    audit().catch((error) => {
      byId("audit").className = "bad";
      say(byId("audit"), error.message);
    }),
  );
}
