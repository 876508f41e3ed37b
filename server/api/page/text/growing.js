// Text and Markdown that grow while an answer arrives. Each is shown at most once per frame, since a layout for
// each token would freeze the page.

import { allElementsOf, definesLinks, elementsOf } from "./markdown.js";
import { patchChildren } from "./patch.js";

// Showing takes at most this share of the time, also where one list or one code block is the whole answer.
const SHARE = 0.25;

// Both kinds: grow(text) with all the text so far, and finish(text).
export function plainView(element, onShow) {
  const node = document.createTextNode("");
  element.replaceChildren(node);
  return perFrame((text) => {
    node.appendData(text.slice(node.length));
    onShow();
  });
}

// Blocks of Markdown that can no longer change are left alone, so that the work is linear in the text.
export function markdownView(element, onShow) {
  element.replaceChildren();
  let settledLength = 0;
  let numSettled = 0;
  return perFrame((text, isWhole) => {
    if (isWhole && (!settledLength || definesLinks(text))) patchChildren(element, allElementsOf(text));
    else {
      const part = elementsOf(text.slice(settledLength));
      patchChildren(element, [...part.settled, ...part.open], numSettled);
      settledLength += part.settledLength;
      numSettled += part.settled.length;
    }
    onShow();
  });
}

function perFrame(show) {
  let text = "";
  let isScheduled = false;
  let restUntilMs = 0;
  const schedule = () => {
    isScheduled = true;
    requestAnimationFrame((startMs) => {
      if (!isScheduled) return;
      if (startMs < restUntilMs) {
        schedule();
        return;
      }
      isScheduled = false;
      const beforeMs = performance.now();
      show(text, false);
      const afterMs = performance.now();
      restUntilMs = afterMs + (afterMs - beforeMs) * (1 / SHARE - 1);
    });
  };
  return {
    grow: (all) => {
      text = all;
      if (!isScheduled) schedule();
    },
    finish: (all) => {
      isScheduled = false;
      show(all, true);
    },
  };
}
