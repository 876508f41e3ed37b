// Makes elements equal to new ones with few changes, so that a selection, the focus and scrolled code stay while
// an answer grows.

// From child `first` on, the children of `parent` become equal to `nodes`.
export function patchChildren(parent, nodes, first = 0) {
  const old = [...parent.childNodes].slice(first);
  nodes.forEach((node, i) => {
    if (!old[i]) parent.append(node);
    else if (!patchNode(old[i], node)) old[i].replaceWith(node);
  });
  for (const surplus of old.slice(nodes.length)) surplus.remove();
}

// False if `old` cannot become equal to `node`.
function patchNode(old, node) {
  if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
    if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.data.length));
    else old.data = node.data;
    return true;
  }
  if (!old.cloneNode(false).isEqualNode(node.cloneNode(false))) return false;
  patchChildren(old, [...node.childNodes]);
  return true;
}
