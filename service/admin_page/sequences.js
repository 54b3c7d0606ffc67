// The sequences: who runs, who waits and why, what each holds, and what can be done with it.

import { attempt, button, byId, clock, confirmed, count, duration, el, milliseconds, onSubmit, say, short, tell } from "./dom.js";
import { showSequence } from "./map.js";
import { act, view } from "./server.js";
import { Table } from "./table.js";

const pathOf = (id) => `sequences/${encodeURIComponent(id)}`;

let table = null;
let holders = null;
let chosen = null; // id
let hasEnded = false; // the chosen one: it is asked for no more
let showTab = () => {};

async function run(id, action, body) {
  if (await attempt(`${id} ${action}`, () => act(`${pathOf(id)}/${action}`, body))) await updateSequences();
}

async function abort(id) {
  const question = `End sequence ${id} now? Whoever waits for its answer gets an error.`;
  if (await confirmed(question, "Abort")) await run(id, "abort");
}

function rowActions(row) {
  const pause = button("", () => run(row.id, pause.dataset.action));
  const actions = [
    button("Details", () => choose(row.id), { "aria-label": `Details of ${row.id}` }),
    pause,
    button("Abort", () => abort(row.id), { class: "danger", "aria-label": `Abort ${row.id}` }),
  ];
  return el("span", { class: "actions" }, ...actions);
}

function updateActions(box, row) {
  const pause = box.children[1];
  const isPaused = row.wait_reason === "paused";
  pause.dataset.action = isPaused ? "resume" : "pause";
  say(pause, isPaused ? "Resume" : "Pause");
  pause.setAttribute("aria-label", `${pause.textContent} ${row.id}`);
  for (const each of [...box.children].slice(1)) each.disabled = row.is_beam;
}

const number = (name, field, title, write = count) => ({
  name,
  title,
  isNumber: true,
  of: (row) => write(row[field]),
  sort: (row) => row[field],
});

const COLUMNS = [
  { name: "id", of: (row) => row.id },
  { name: "request", of: (row) => row.request, title: "as the client knows it" },
  { name: "state", of: (row) => row.state, sort: (row) => row.state },
  { name: "waits for", of: (row) => row.wait_reason || "–", sort: (row) => row.wait_reason },
  { name: "tenant", of: (row) => row.tenant, sort: (row) => row.tenant },
  number("prio", "priority", "lower runs earlier"),
  number("age", "age_s", "", duration),
  number("queue", "queue_ms", "until it was admitted", milliseconds),
  number("TTFT", "ttft_ms", "until its first token", milliseconds),
  number("prompt", "prompt_tokens", "tokens"),
  number("cached", "cached_tokens", "of the prompt, from the page cache"),
  number("output", "output_tokens", "tokens so far"),
  number("max", "max_tokens", "tokens at most"),
  number("rss", "rss", "frames that it maps"),
  number("pss", "pss", "the same, each divided by its holders", short),
  number("swap", "swap", "pages in swap slots"),
  number("preempted", "preemptions", "times"),
  { name: "actions", make: rowActions, update: updateActions },
];

const HOLDER_COLUMNS = [
  { name: "holder", of: (row) => row.id },
  { name: "owner", of: (row) => row.owner || "–" },
  { name: "tenant", of: (row) => row.tenant || "–" },
  number("rss", "rss", "frames"),
  number("pss", "pss", "frames, each divided by its holders", short),
  number("expires in", "expires_in_s", "", duration),
];

const LARGEST = 7;

/** Who holds most, by frames. */
function showLargest(found) {
  const all = [...found.sequences, ...found.holders].filter((holder) => holder.rss > 0);
  const largest = all.toSorted((a, b) => b.rss - a.rss).slice(0, LARGEST);
  const lines = largest.map((holder) => {
    const name = holder.request ?? `${holder.id} ${holder.owner}`;
    const label = holder.request ? button(name, () => choose(holder.id), { class: "link" }) : el("span", {}, name);
    const bar = el("i", { class: holder.request ? "sequence" : "pin", "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, (100 * holder.rss) / largest[0].rss)}%`;
    return el("li", {}, label, el("span", {}, `${count(holder.rss)} (${short(holder.pss)} pss)`), bar);
  });
  byId("largest").replaceChildren(...(lines.length ? lines : [el("li", { class: "none" }, "nobody holds a frame")]));
}

export async function updateSequences() {
  const found = await view("sequences?limit=500");
  if (!byId("largest").contains(document.activeElement)) showLargest(found);
  table.show(found.sequences);
  holders.show(found.holders.filter((holder) => holder.rss > 0 || holder.id !== "transfer"));
  const more = found.total - found.sequences.length;
  say(byId("more-sequences"), more > 0 ? `and ${count(more)} more` : "");
  if (chosen !== null && !hasEnded) await updateDetails();
}

// ---------------------------------------------------------------- one of them

export async function choose(id) {
  chosen = id;
  hasEnded = false;
  byId("details").hidden = false;
  byId("details").dataset.id = id;
  say(byId("details-title"), `Sequence ${id}`);
  showTab();
  await updateSequences();
  byId("details-title").focus();
}

/** By the id of its request, or its own. */
export async function chooseByOwner(owner) {
  const found = await view("sequences?limit=10000");
  const row = found.sequences.find((each) => each.request === owner || each.id === owner);
  if (row) await choose(row.id);
  else tell(`${owner} is no open sequence`, "refused");
}

function close() {
  chosen = null;
  byId("details").hidden = true;
}

async function updateDetails() {
  const id = chosen;
  const status = await view(`${pathOf(id)}/status`).catch((error) => (error.status === 404 ? null : undefined));
  if (status === undefined || chosen !== id) return;
  hasEnded = status === null;
  byId("sequence-actions").disabled = hasEnded || status.is_beam;
  if (hasEnded) {
    say(byId("details-state"), "has ended");
    return;
  }
  const [smaps, maps, trace] = await Promise.all([
    view(`${pathOf(id)}/smaps`),
    view(`${pathOf(id)}/maps`),
    view(`${pathOf(id)}/trace?limit=50`),
  ]).catch(() => [null]);
  if (smaps === null || chosen !== id) return;
  say(byId("details-state"), status.wait_reason ? `${status.state}, waits: ${status.wait_reason}` : status.state);
  showFacts(status, smaps);
  byId("maps").replaceChildren(...maps.runs.map((run) => mapLine(run, maps.runs.at(-1).end)));
  const lines = trace.events
    .toReversed()
    .map((event) =>
      el("li", {}, el("time", {}, clock(event.ts)), el("b", {}, event.event), el("span", {}, `${count(event.count)}`)),
    );
  byId("sequence-trace").replaceChildren(...lines);
}

function showFacts(status, smaps) {
  const facts = {
    "tokens held": count(smaps.tokens),
    "private frames": count(smaps.private_dirty),
    "shared frames": count(smaps.shared_clean),
    "pss": short(smaps.pss),
    "in swap": count(smaps.swap),
    "unused positions": count(smaps.waste_tokens),
    "committed": count(smaps.committed),
    "cached of prompt": `${count(status.cached_tokens)} of ${count(status.prompt_tokens)}`,
    "missed because": status.miss ?? "–",
    "deadline in": duration(status.deadline_in_s),
    "client": status.client || "–",
  };
  byId("sequence-facts").replaceChildren(
    ...Object.entries(facts).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}

function mapLine(run, end) {
  const bar = el("i", { class: `run ${run.place} ${run.flags.endsWith("s") ? "shared" : "private"}`, "aria-hidden": "true" });
  bar.style.width = `${Math.max(1, (60 * (run.end - run.start)) / end)}%`;
  const words = `${count(run.start)}–${count(run.end)}  ${run.flags}  ${run.place}  ${run.origin}`;
  return el("li", {}, el("span", {}, words), bar);
}

function listen() {
  const simple = { pause: "pause", resume: "resume", "swap-out": "swap_out", "swap-in": "swap_in" };
  for (const [id, action] of Object.entries(simple)) byId(`do-${id}`).addEventListener("click", () => run(chosen, action));
  byId("do-abort").addEventListener("click", () => abort(chosen));
  byId("do-show").addEventListener("click", () =>
    showSequence(chosen).catch((error) => tell(error.message, "refused")),
  );
  byId("close-details").addEventListener("click", close);
  byId("details").addEventListener("keydown", (event) => event.key === "Escape" && close());
  const form = (id, action, body) => onSubmit(id, (sent) => run(chosen, action, body(new FormData(sent))));
  form("set-priority", "priority", (data) => ({ priority: Number(data.get("priority")) }));
  form("set-oom", "oom_score_adj", (data) => ({ oom_score_adj: Number(data.get("oom_score_adj")) }));
  form("save-checkpoint", "checkpoint", (data) => ({ path: data.get("path") }));
  form("set-advice", "madvise", (data) => ({ advice: data.get("advice") }));
}

/** show: brings the tab of sequences to the front. */
export function startSequences(show) {
  showTab = show;
  table = new Table(byId("sequences-table"), {
    caption: "Sequences, oldest first",
    columns: COLUMNS,
    key: (row) => row.id,
    empty: "nobody runs or waits",
    isMarked: (row) => row.id === chosen,
  });
  holders = new Table(byId("holders-table"), {
    caption: "Holders of frames that are no sequences: pins, copies in flight",
    columns: HOLDER_COLUMNS,
    key: (row) => row.id,
    empty: "no pins, no copies",
  });
  listen();
}
