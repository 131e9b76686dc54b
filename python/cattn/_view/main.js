// The entry points: render() for anywidget, showSaved() for a page without a kernel.

function render({ model, el }) {
  const kinds = { weights: WeightsView, statistics: StatisticsView };
  const view = new kinds[model.get("info").kind](model, el);
  return () => view.close();
}

// A model that lives in the page: what anywidget's model is to a view with a kernel.
function showSaved(state, el) {
  const listeners = {};
  render({
    el,
    model: {
      get: (name) => state[name],
      set(name, value) {
        const changed = JSON.stringify(state[name]) !== JSON.stringify(value);
        state[name] = value;
        if (changed) (listeners[`change:${name}`] || []).forEach((listener) => listener());
      },
      save_changes() {},
      on: (name, listener) => (listeners[name] ||= []).push(listener),
      off: (name, listener) => (listeners[name] = (listeners[name] || []).filter((other) => other !== listener)),
    },
  });
}

// Returns the bytes of a saved page, which are deflated and in base64.
async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// In a frame the saved page takes the theme of the page around it, and gives the frame its height. Where it may not reach
// the frame, as in a file, it sends the height to the page around it.
function fitIntoFrame() {
  if (window.parent === window) return;
  let frame = null;
  try {
    frame = window.frameElement;
  } catch {
    // the page around is of another origin
  }
  const fit = () => {
    const height = document.body.offsetHeight + 2;
    if (frame) frame.style.height = `${height}px`;
    else window.parent.postMessage({ cattnHeight: height }, "*");
  };
  new ResizeObserver(fit).observe(document.body);
  if (!frame) return;
  const picture = frame.nextElementSibling;
  if (picture && picture.classList.contains("cattn-picture")) picture.style.display = "none";
  watchTheme(frame.parentElement, (theme) => (document.documentElement.style.colorScheme = theme));
}

export default { render };
