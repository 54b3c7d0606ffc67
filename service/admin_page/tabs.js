// The tables beside that of sequences: tenants, the page cache with its pins, misses, OOM scores, the queue, the trace.

import { attempt, button, byId, clock, count, duration, el, milliseconds, onSubmit, say, short, tell } from "./dom.js";
import { showFrameOnMap } from "./map.js";
import { choose } from "./sequences.js";
import { act, view } from "./server.js";
import { Table } from "./table.js";

const text = (name, of, title) => ({ name, title, of, sort: of });
const number = (name, of, write = count, title = "") => ({ name, title, isNumber: true, of: (row) => write(of(row)), sort: of });
const limit = (value) => (value == null ? "max" : count(value));
/** A sequence's id that leads to its details. */
const sequence = (name, of) => ({
  name,
  make: (row) => button(of(row), () => choose(of(row)), { class: "link" }),
});

// ---------------------------------------------------------------- tenants

function makeTenants() {
  const table = new Table(byId("tenants-table"), {
    caption: "Tenants: memory in frames, swap in slots",
    key: (row) => row.name,
    columns: [
      text("tenant", (row) => row.name),
      number("current", (row) => row.current),
      number("active", (row) => row.stat.active),
      number("cached", (row) => row.stat.cached),
      number("peak", (row) => row.peak),
      number("min", (row) => row.min),
      number("low", (row) => row.low),
      number("high", (row) => row.high, limit),
      number("max", (row) => row.max, limit),
      number("swap", (row) => row.swap_current),
      number("swap max", (row) => row.swap_max, limit),
      number("weight", (row) => row.weight),
      text("isolated", (row) => (row.isolate ? "yes" : "no")),
      number("some avg10", (row) => row.pressure.some.avg10, (value) => `${short(value)} %`, "memory pressure"),
      number("high events", (row) => row.events.high),
      number("max events", (row) => row.events.max),
      {
        name: "actions",
        make: (row) => button("Limits", () => fillLimits(row.name), { "aria-label": `Limits of ${row.name}` }),
      },
    ],
  });
  return async () => table.show((await view("tenants")).tenants);
}

async function fillLimits(name) {
  const facts = await view(`tenants/${encodeURIComponent(name)}`);
  const form = byId("set-limits");
  form.elements.tenant.value = name;
  for (const field of ["min", "low", "high", "max", "swap_max", "weight"]) {
    form.elements[field].value = facts[field] ?? "max";
  }
  form.elements.isolate.value = String(facts.isolate);
  form.elements.min.focus();
}

function listenToLimits(refresh) {
  byId("set-limits").addEventListener("submit", async (event) => {
    event.preventDefault();
    const data = new FormData(event.target);
    const body = {};
    for (const field of ["min", "low", "high", "max", "swap_max", "weight"]) {
      const value = data.get(field).trim();
      if (value) body[field] = value === "max" ? value : Number(value);
    }
    if (data.get("isolate")) body.isolate = data.get("isolate") === "true";
    const name = data.get("tenant").trim();
    if (await attempt(`tenant ${name}`, () => act(`tenants/${encodeURIComponent(name)}`, body))) await refresh();
  });
}

// ---------------------------------------------------------------- the page cache

function makeCache(refresh) {
  const pins = new Table(byId("pins-table"), {
    caption: "Pins",
    key: (row) => row.pin,
    empty: "nothing is pinned",
    columns: [
      text("pin", (row) => String(row.pin)),
      text("owner", (row) => row.owner),
      text("tenant", (row) => row.tenant),
      number("tokens", (row) => row.tokens),
      number("frames", (row) => row.frames),
      number("expires in", (row) => row.expires_in_s, duration),
      {
        name: "actions",
        make: (row) => button("Unpin", () => unpin(row.pin, refresh), { "aria-label": `Unpin ${row.pin}` }),
      },
    ],
  });
  const pages = new Table(byId("cache-table"), {
    caption: "Cached pages, those found most often first",
    key: (row) => row.hash,
    empty: "nothing is cached",
    columns: [
      text("hash", (row) => row.hash),
      number("depth", (row) => row.depth_tokens, count, "tokens from the beginning of the prompt to its end"),
      number("found", (row) => row.hits, count, "times"),
      number("held by", (row) => row.references),
      text("list", (row) => (row.is_active ? "active" : "inactive")),
      number("idle", (row) => row.idle_s, duration),
      text("tenant", (row) => row.tenant),
      text("pinned", (row) => (row.pinned ? "yes" : "")),
      text("text", (row) => row.text ?? "not shown", "only with --admin-show-text"),
      { name: "actions", make: (row) => cacheActions(row, refresh) },
    ],
  });
  return async () => {
    const found = await view("page_cache?limit=200");
    pins.show(found.pins);
    pages.show(found.top);
    say(byId("cache-facts"), `${count(found.pages)} pages can be found by content, ${count(found.active_pages)} on the active list`);
  };
}

function cacheActions(first, refresh) {
  const row = (event) => event.currentTarget.closest("tr").row; // as it is now: a page may have moved
  const pin = (event) => pinHash(row(event).hash, row(event).tenant, refresh);
  const show = (event) => {
    const { frame, slot } = row(event);
    if (frame === null) tell(`This page is in swap, in slot ${slot}`);
    else showFrameOnMap(frame);
  };
  return el(
    "span",
    { class: "actions" },
    button("Pin", pin, { "aria-label": `Pin the prefix that ends with ${first.hash}` }),
    button("On the map", show, { "aria-label": `${first.hash} on the map` }),
  );
}

async function pinHash(hash, tenant, refresh) {
  if (await attempt(`pin ${hash}`, () => act("page_cache/pin", { owner: "admin page", hash, tenant }))) await refresh();
}

async function unpin(pin, refresh) {
  if (await attempt(`unpin ${pin}`, () => act("page_cache/unpin", { pin }))) await refresh();
}

/** The prefix that a form names. */
function prefixOf(data) {
  const content = data.get("content").trim();
  const tenant = data.get("tenant") || "default";
  if (data.get("by") === "hash") return { tenant, hash: content };
  if (data.get("by") === "tokens") return { tenant, tokens: content.split(/[\s,]+/).filter(Boolean).map(Number) };
  return { tenant, messages: [{ role: "system", content }] };
}

function listenToPrefixes(refresh) {
  onSubmit("pin-prefix", async (form) => {
    const data = new FormData(form);
    const body = { owner: data.get("owner"), ...prefixOf(data) };
    if (data.get("ttl_s")) body.ttl_s = Number(data.get("ttl_s"));
    if (await attempt("pin", () => act("page_cache/pin", body))) await refresh();
  });
  onSubmit("advise-prefix", async (form) => {
    const data = new FormData(form);
    const body = { advice: data.get("advice"), ...prefixOf(data) };
    if (await attempt("advice", () => act("page_cache/madvise", body))) await refresh();
  });
}

// ---------------------------------------------------------------- misses

const REASONS = {
  last_token: "all of it is cached; one token is computed all the same",
  tail_shorter_than_page: "what is left is shorter than a page",
  never_computed: "nobody has sent this before, or it is forgotten",
  token_differs: "a cached page begins like it, and then differs",
  other_salt: "cached under another salt, or of another tenant",
  being_written: "another sequence computes it just now",
  evicted: "it was cached, and its frame was needed",
  swapped: "it is in swap",
  disabled: "the request does not use the cache",
};

function makeMisses() {
  const reasons = new Table(byId("reasons-table"), {
    caption: "Why the latest prompts were not cached in full",
    key: (row) => row.reason,
    empty: "no misses yet",
    columns: [
      text("reason", (row) => row.reason),
      number("prompts", (row) => row.prompts),
      number("tokens missed", (row) => row.tokens),
      text("which means", (row) => REASONS[row.reason] ?? ""),
    ],
  });
  const misses = new Table(byId("misses-table"), {
    caption: "The latest misses, newest first",
    key: (row) => `${row.id} ${row.ts}`,
    empty: "no misses yet",
    columns: [
      text("time", (row) => clock(row.ts)),
      text("request", (row) => row.request),
      text("tenant", (row) => row.tenant),
      number("prompt", (row) => row.prompt_tokens),
      number("cached", (row) => row.cached_tokens),
      text("reason", (row) => row.reason),
      number("at token", (row) => row.position, count, "where what is cached ends"),
      text("evicted", (row) => (row.evicted_ts == null ? "–" : clock(row.evicted_ts))),
      text("evicted for", (row) => row.evicted_for || "–"),
      text("written by", (row) => row.writer || "–"),
    ],
  });
  return async () => {
    const facts = await view("misses?limit=1000");
    const found = facts.misses;
    const sums = Map.groupBy(found, (miss) => miss.reason);
    const rows = [...sums].map(([reason, all]) => ({
      reason,
      prompts: all.length,
      tokens: all.reduce((sum, miss) => sum + miss.prompt_tokens - miss.cached_tokens, 0),
    }));
    reasons.show(rows.toSorted((a, b) => b.tokens - a.tokens));
    const set = facts.working_set;
    say(
      byId("misses-facts"),
      `${count(set.refaults)} pages came back after ${count(set.evictions)} evictions` +
        (set.refaults ? `; ${count(set.frames_to_avoid_most)} more frames would have kept nine tenths of them` : ""),
    );
    misses.show(found.slice(0, 200));
  };
}

// ---------------------------------------------------------------- who goes next, who waits

function makeScores() {
  const table = new Table(byId("oom-table"), {
    caption: "Who would give way now if one frame were needed; then the others, worst off first",
    key: (row) => row.id,
    empty: "nobody runs",
    isMarked: (row) => row.is_next,
    columns: [
      sequence("id", (row) => row.id),
      text("next", (row) => (row.is_next ? "goes next" : "")),
      text("request", (row) => row.request),
      number("score", (row) => row.score, (value) => (value == null ? "never" : short(value))),
      number("adjusted", (row) => row.oom_score_adj, count, "oom_score_adj, -1000 to 1000"),
      number("frames", (row) => row.frames),
      number("to copy", (row) => row.pages_to_copy, count, "pages"),
      number("swap takes", (row) => row.swap_ms, milliseconds),
      number("recompute takes", (row) => row.recompute_ms, milliseconds),
      text("would be", (row) => row.action),
      number("preempted", (row) => row.preemptions, count, "times"),
    ],
  });
  return async () => {
    const found = await view("oom_score");
    table.show(found.candidates.toSorted((a, b) => b.is_next - a.is_next));
    const costs = `a page is copied in ${short(found.copy_page_us)} µs, a token computed in ${short(found.prefill_token_us)} µs`;
    say(byId("oom-facts"), `${found.swap_possible ? "Swap is possible" : "Nobody would be swapped"}; ${costs}`);
  };
}

function makeQueue() {
  const table = new Table(byId("queue-table"), {
    caption: "The queue, in order",
    key: (row) => row.id,
    empty: "nobody waits",
    columns: [
      sequence("id", (row) => row.id),
      text("request", (row) => row.request),
      text("tenant", (row) => row.tenant),
      text("waits for", (row) => row.reason),
      number("age", (row) => row.age_s, duration),
      number("tokens", (row) => row.tokens),
      number("could have", (row) => row.could_have, count, "frames, when it was tried last"),
    ],
  });
  return async () => {
    const found = await view("scheduler?limit=500");
    table.show(found.queue);
    say(
      byId("queue-facts"),
      `${count(found.running)} of ${count(found.max_running)} places run, ${count(found.waiting)} wait, ` +
        `${count(found.swapped)} in swap; ${found.has_place ? "there is a place" : "every place is taken"}`,
    );
  };
}

// ---------------------------------------------------------------- the trace

const TRACE_ROWS = 300;

function makeTrace() {
  let events = [];
  let after = 0;
  const table = new Table(byId("trace-table"), {
    caption: "What has happened to memory, newest first",
    key: (row) => row.number,
    empty: "nothing yet",
    columns: [
      text("time", (row) => clock(row.ts)),
      number("step", (row) => row.step),
      text("event", (row) => row.event),
      text("request", (row) => row.request || "–"),
      text("tenant", (row) => row.tenant || "–"),
      number("place", (row) => row.place, (value) => String(value), "frame, slot or position, as the event has it"),
      number("count", (row) => row.count),
    ],
  });
  const restart = () => {
    events = [];
    after = 0;
  };
  byId("trace-filter").addEventListener("submit", (event) => {
    event.preventDefault();
    restart();
    update().catch((error) => tell(error.message, "refused"));
  });
  const update = async () => {
    const query = new URLSearchParams({ limit: String(TRACE_ROWS), after: String(after) });
    for (const [name, value] of new FormData(byId("trace-filter"))) if (value) query.set(name, value);
    const found = await view(`trace?${query}`);
    if (found.recorded < after) restart();
    if (!found.events.length) return table.show(events);
    after = found.events.at(-1).number;
    events = [...found.events.toReversed(), ...events].slice(0, TRACE_ROWS);
    table.show(events);
  };
  return update;
}

/** Names of tabs -> what brings each up to date. */
export function makeTabs() {
  const updates = {};
  const refresh = (name) => () => updates[name]().catch((error) => tell(error.message, "refused"));
  updates.tenants = makeTenants();
  updates.cache = makeCache(refresh("cache"));
  updates.misses = makeMisses();
  updates.oom = makeScores();
  updates.queue = makeQueue();
  updates.trace = makeTrace();
  listenToLimits(refresh("tenants"));
  listenToPrefixes(refresh("cache"));
  return updates;
}
