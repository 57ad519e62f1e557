// Return a figure as an SVG file in the colours for white paper, which are the defaults of the CSS variables.
function file(svg) {
  const copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
  copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  copy.setAttribute('width', box.width * 3);
  copy.setAttribute('height', box.height * 3);
  copy.style.background = '#fff';
  const text = new XMLSerializer().serializeToString(copy).replace(/var\(--\w+,(#\w+)\)/g, '$1');
  return new Blob([text], {type: 'image/svg+xml'});
}
function save(blob, name) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function png(blob, name) {
  const image = new Image(), address = URL.createObjectURL(blob);
  image.onload = () => {
    const canvas = document.createElement('canvas'), pen = canvas.getContext('2d');
    canvas.width = image.width;
    canvas.height = image.height;
    pen.fillStyle = '#fff';
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(image, 0, 0);
    URL.revokeObjectURL(address);
    canvas.toBlob(png => save(png, name));
  };
  image.src = address;
}
for (const place of document.querySelectorAll('.save')) {
  const svg = place.closest('figure').querySelector('svg'), name = place.dataset.name;
  for (const kind of ['SVG', 'PNG']) {
    const button = document.createElement('button');
    button.textContent = kind;
    button.type = 'button';
    button.onclick = () => kind === 'SVG' ? save(file(svg), name + '.svg') : png(file(svg), name + '.png');
    place.append(button);
  }
}
