// Elements, gestures and the host's theme.

// Returns a new element. Keys that start with "on" are listeners; null and false leave an attribute out.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Tokens of byte-pair encodings as the text that they stand for: GPT-2 writes each byte as a letter, SentencePiece a
// space as ▁. `all` are the tokens of the whole view, which tell the kind.
function readable(tokens, all = tokens) {
  if (!tokens) return tokens;
  const plain = (token) => token.replace(/▁/g, " ");
  if (all.some((token) => /[ĠĊ]/.test(token))) {
    const bytes = new Map();
    let next = 256;
    for (let byte = 0; byte < 256; byte++) {
      const itself = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
      bytes.set(String.fromCodePoint(itself ? byte : next++), byte);
    }
    const decoder = new TextDecoder();
    return tokens.map((token) => {
      const found = [...token].map((letter) => bytes.get(letter));
      return found.includes(undefined) ? plain(token) : decoder.decode(Uint8Array.from(found));
    });
  }
  return tokens.map(plain);
}

const LONGEST_NAME = 100; // characters of a token

// Makes the white space of a token visible. Control characters become their pictures, and U+FFFD is in place of others
// that no file of XML may hold or that turn the text around them.
function visible(token) {
  if (token === "") return "∅";
  const letters = [...token];
  const text = letters.length > LONGEST_NAME ? `${letters.slice(0, LONGEST_NAME - 1).join("")}…` : token;
  const picture = (letter) => {
    const code = letter.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : code === 127 ? "\u2421" : "\ufffd";
  };
  return text.replace(/[\n\u2028\u2029]/g, "↵").replace(/\t/g, "→")
    .replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length))
    .replace(/[\p{Cc}\p{Cs}\p{Noncharacter_Code_Point}\u202a-\u202e\u2066-\u2069]/gu, picture);
}

// Cuts a text to the pixels that it may take, with an ellipsis.
function cutText(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const short = [...text];
  while (short.length > 1 && context.measureText(`${short.join("")}…`).width > room) short.pop();
  return `${short.join("")}…`;
}

// Scrolls a box, not the page, to one of its elements.
function scrollInto(box, element) {
  const [outer, inner] = [box.getBoundingClientRect(), element.getBoundingClientRect()];
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 8;
  if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 8;
}

// Whether the page around the element is dark: JupyterLab, VS Code, Colab and marimo each say it in their own way, but
// all have a background, or at least a colour of text.
function isDark(element) {
  const probe = make("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const parse = (colour) => { // by drawing, because colours are written in many ways
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data;
  };
  for (let node = element; node; node = node.parentElement || (node.getRootNode() || {}).host) {
    const [r, g, b, alpha] = parse(getComputedStyle(node).backgroundColor);
    if (alpha > 127) return luminance([r, g, b]) < 0.18;
  }
  return luminance(parse(getComputedStyle(element).color)) > 0.4;
}

// Calls change(theme) when the theme of the page changes; returns a function that stops this.
function watchTheme(element, change) {
  let known = null;
  const look = () => {
    const theme = isDark(element) ? "dark" : "light";
    if (theme !== known && element.isConnected) change((known = theme));
  };
  const lookTwice = () => {
    look();
    setTimeout(look, 400); // hosts load the style sheet of a theme after they have named it
  };
  const media = matchMedia("(prefers-color-scheme: dark)");
  const observer = new MutationObserver(lookTwice);
  const { documentElement, body } = element.ownerDocument;
  for (const node of new Set([documentElement, body, document.documentElement])) observer.observe(node, { attributes: true });
  media.addEventListener("change", lookTwice);
  lookTwice();
  return () => {
    observer.disconnect();
    media.removeEventListener("change", lookTwice);
  };
}

// Pointer gestures of a canvas: hover(x, y), tap(x, y), brush(x0, y0, x1, y1, done), zoom(factor, x, y). The plain wheel
// scrolls the page; with Ctrl, which a pinch on a touchpad sends as well, it zooms.
function gestures(element, { hover, tap, brush, zoom }) {
  const pointers = new Map();
  let start = null;
  let moved = false;
  let spread = 0;
  const place = (event) => {
    const box = element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const distance = () => {
    const [[ax, ay], [bx, by]] = [...pointers.values()];
    return Math.hypot(ax - bx, ay - by);
  };
  element.addEventListener("pointerdown", (event) => {
    if (event.button > 0) return;
    element.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    start = place(event);
    moved = false;
    if (pointers.size === 2) spread = distance();
  });
  element.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (pointers.has(event.pointerId)) pointers.set(event.pointerId, [x, y]);
    if (pointers.size === 2) {
      const now = distance();
      const [[ax, ay], [bx, by]] = [...pointers.values()];
      if (Math.abs(now / spread - 1) > 0.05) {
        zoom(now / spread, (ax + bx) / 2, (ay + by) / 2);
        spread = now;
      }
      moved = true;
    } else if (start && (moved || Math.hypot(x - start[0], y - start[1]) > 6)) {
      moved = true;
      brush(...start, x, y, false);
    } else {
      hover(x, y);
    }
  });
  const end = (event) => {
    if (!pointers.delete(event.pointerId) || !start) return;
    const [x, y] = place(event);
    if (event.type === "pointerup" && pointers.size === 0 && spread === 0) {
      if (moved) brush(...start, x, y, true);
      else tap(x, y);
    } else {
      brush(0, 0, 0, 0, false);
    }
    if (pointers.size === 0) [start, spread] = [null, 0];
  };
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
  element.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(Math.exp(-event.deltaY / 200), ...place(event));
    },
    { passive: false },
  );
}

// Returns a window within 0 to `length`, `factor` times as narrow as `from` to `to`, in which `at` keeps its place.
function zoomed(from, to, length, factor, at, least = 4) {
  const size = Math.min(Math.max(Math.round((to - from) / factor), Math.min(least, length)), length);
  const start = Math.min(Math.max(Math.round(at - ((at - from) / (to - from)) * size), 0), length - size);
  return [start, start + size];
}
