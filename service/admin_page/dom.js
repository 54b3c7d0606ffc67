// Making elements, writing numbers, asking and telling: what every part of the page needs.

/** el("button", {class: "quiet", onclick: f, aria-label: "x"}, child, …) */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const byId = (id) => document.getElementById(id);

export const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);

/** send(form) when a form is submitted. */
export function onSubmit(id, send) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    send(event.target);
  });
}

/** Set text only where it changes, so that nothing is laid out again for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---------------------------------------------------------------- numbers

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (value == null ? "–" : grouped.format(value));

/** Three digits that matter. */
export function short(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return grouped.format(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size === 0 ? "0" : value.toFixed(2);
}

export const milliseconds = (value) =>
  value == null ? "–" : value >= 10_000 ? `${short(value / 1000)} s` : `${short(value)} ms`;

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; bytes >= 1024 && i < units.length - 1; i++) bytes /= 1024;
  return `${short(bytes)} ${units[i]}`;
}

export const clock = (ts) => new Date(1000 * ts).toLocaleTimeString("en-GB");

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---------------------------------------------------------------- asking and telling

/** One line at the foot of the page, read out by screen readers. */
export function tell(text, kind = "done") {
  const line = byId("told");
  line.className = kind;
  line.textContent = `${new Date().toLocaleTimeString("en-GB")}  ${text}`;
}

/** What an action answered, or why it was refused. */
export async function attempt(what, action) {
  try {
    const { before, after } = await action();
    const changed = Object.keys(after).filter((name) => JSON.stringify(before[name] ?? null) !== JSON.stringify(after[name]));
    const words = changed.map((name) => `${name} ${written(before[name])} → ${written(after[name])}`);
    tell(`${what}: ${words.join(", ") || "done, nothing changed"}`);
    return true;
  } catch (error) {
    tell(`${what}: ${error.message}`, "refused");
    return false;
  }
}

const written = (value) => (value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

/** Resolves to true if the operator goes on. */
export function confirmed(question, verb) {
  const dialog = byId("confirm");
  say(dialog.querySelector("p"), question);
  say(dialog.querySelector("[value=yes]"), verb);
  return answered(dialog).then((answer) => answer === "yes");
}

/** The value of the button that closed a dialog. */
export function answered(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}

/** Call f now and every interval while the tab can be seen; one call at a time. */
export function poll(f, interval_ms) {
  let isBusy = false;
  const turn = async () => {
    if (isBusy || document.hidden) return;
    isBusy = true;
    try {
      await f();
    } catch (error) {
      if (error.status !== 503) tell(error.message, "refused");
    } finally {
      isBusy = false;
    }
  };
  setInterval(turn, interval_ms);
  turn();
}
