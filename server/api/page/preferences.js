// Choices that outlive the page, in localStorage. Where the browser refuses storage, they last as long as the page.

const PREFIX = "penstock-";
const session = new Map();

export function recall(name, otherwise) {
  if (session.has(name)) return session.get(name);
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function keep(name, value) {
  session.set(name, value);
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is off or full: the value above lasts until a reload
  }
}
