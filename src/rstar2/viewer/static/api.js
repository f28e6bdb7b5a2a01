// Requests to the server, and the addresses of the page's views.

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function get(what, run = null, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  const path = run === null ? what : `${what}/${encodeURIComponent(run)}`;
  const answer = await fetch(`/api/${path}${asked.size ? `?${asked}` : ""}`, { signal: AbortSignal.timeout(60000) });
  const body = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Refused(answer.status, body.error || `the server answered ${answer.status}`);
  return body;
}

const encode = (id) => String(id).split("/").map(encodeURIComponent).join("/");
const queryOf = (query) => {
  const asked = new URLSearchParams(Object.entries(query || {}).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  return asked.size ? `?${asked}` : "";
};

/** Addresses of the page's own views; every one can be shared. */
export const at = {
  runs: () => "/",
  compare: (query) => `/compare${queryOf(query)}`,
  run: (run, hash = "") => `/run/${encodeURIComponent(run)}${hash}`,
  step: (run, stage, step, query) => `/run/${encodeURIComponent(run)}/step/${encodeURIComponent(stage)}/${step}${queryOf(query)}`,
  timeline: (run, stage, step, query) => `/run/${encodeURIComponent(run)}/timeline/${encodeURIComponent(stage)}/${step}${queryOf(query)}`,
  group: (run, id, query) => `/run/${encodeURIComponent(run)}/group/${encode(id)}${queryOf(query)}`,
  rollout: (run, id, query) => `/run/${encodeURIComponent(run)}/rollout/${encode(id)}${queryOf(query)}`,
  rollouts: (run, query) => `/run/${encodeURIComponent(run)}/rollouts${queryOf(query)}`,
};
