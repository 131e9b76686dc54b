// Where the page is opened as a file, a live view may not reach its frame, and sends its height instead.
addEventListener("message", (event) => {
  for (const frame of document.querySelectorAll("iframe.cattn-live")) {
    if (frame.contentWindow === event.source && event.data && event.data.cattnHeight > 0) {
      frame.style.height = `${event.data.cattnHeight}px`;
    }
  }
});
