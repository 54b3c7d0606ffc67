// What the page asks the server: views, actions, streams. The admin key, if one is needed, is asked for once and kept in
// this tab's session storage; it goes into a header, never into an address.

const BASE = "v1/";
const KEY = "pagewalk.adminKey";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let askForKey = async () => null;
let asking = null;

/** ask(reason) shows a form and resolves to a key, or to null. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

/** fetch, with the key. Asks for another key as long as the one that was sent opens nothing. */
async function open(path, options = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEY);
    const response = await fetch(BASE + path, { ...options, cache: "no-store", headers: headers(options.headers ?? {}) });
    if (response.status !== 401 && !(response.status === 403 && sent && (await isWrongKey(response)))) return response;
    if (sessionStorage.getItem(KEY) !== sent) continue; // somebody else has given another one meanwhile
    asking ??= askForKey(sent ? "This key opens nothing here." : "").finally(() => (asking = null));
    const key = await asking;
    if (!key) throw new ServerError(401, "No admin key was given.");
    setKey(key);
  }
}

async function isWrongKey(response) {
  const body = await response.clone().text();
  return body.includes("does not open the admin routes");
}

async function checked(response) {
  if (response.ok) return response;
  let message = response.statusText;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of our answers: the status has to do
  }
  throw new ServerError(response.status, message);
}

/** A view, as an object. */
export async function view(path) {
  return (await checked(await open(path))).json();
}

/** An action: {done, before, after}. */
export async function act(path, body = {}) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return (await checked(await open(path, options))).json();
}

/** Calls take(event) for each event, opens the stream again when it breaks, and rests while the tab cannot be seen. */
export function follow(path, take, tell) {
  let stop = new AbortController();
  const run = async () => {
    for (let wait_ms = 500; ; wait_ms = Math.min(2 * wait_ms, 8000)) {
      if (document.hidden) await visible();
      stop = new AbortController();
      try {
        const response = await checked(await open(path, { signal: stop.signal }));
        tell("live");
        for await (const event of events(response.body)) {
          if (event.error) throw new ServerError(event.error.code, event.error.message);
          wait_ms = 500;
          take(event);
        }
        tell("ended");
      } catch (error) {
        if (!document.hidden) tell(error instanceof ServerError ? error.message : "no answer");
      }
      if (!document.hidden) await new Promise((resolve) => setTimeout(resolve, wait_ms));
    }
  };
  document.addEventListener("visibilitychange", () => document.hidden && stop.abort());
  run();
}

const visible = () =>
  new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });

/** The data of server-sent events, parsed. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) if (frame.startsWith("data: ")) yield JSON.parse(frame.slice(6));
  }
}
