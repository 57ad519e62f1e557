"""How a page looks, and the little that it can do."""

from __future__ import annotations

from fedmpi.analysis.pages.drawing.svg import ON_DARK, ON_LIGHT, RULES

STYLE = f"""
:root{{color-scheme:light dark;{ON_LIGHT}--paper:#fff;--well:#f5f6f8;--link:#005f95;--warn:#fff3dc}}
@media (prefers-color-scheme:dark){{:root{{{ON_DARK}--paper:#0d1117;--well:#171c24;--link:#7cc0f0;--warn:#3a2c10}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1180px;padding:0 16px 40px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
h1{{font-size:1.7rem;line-height:1.2;margin:28px 0 6px;overflow-wrap:anywhere}}
h2{{font-size:1.25rem;margin:40px 0 10px;padding-top:10px;border-top:1px solid var(--rule)}}
h3{{font-size:1rem;margin:0;font-weight:600}}
header p{{margin:2px 0;color:var(--soft);overflow-wrap:anywhere}}
nav{{display:flex;flex-wrap:wrap;gap:4px 16px;margin-top:12px}}a{{color:var(--link)}}
section{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:20px;align-items:start}}
section>h2,section>p,section>.wide,section>details,section>h3{{grid-column:1/-1;margin-bottom:0}}
section>p{{margin:0}}section>h3{{margin-top:8px}}
figure{{margin:0;background:var(--well);border-radius:8px;padding:12px 12px 8px;min-width:0}}
figcaption{{display:flex;justify-content:space-between;gap:8px;align-items:baseline;margin-bottom:6px}}
figcaption h3::first-letter{{text-transform:uppercase}}
.save{{font-size:.8rem;white-space:nowrap}}.save a,.save button{{color:var(--soft);margin-left:8px;
text-decoration:underline;background:none;border:0;padding:0;font:inherit;cursor:pointer}}
figure svg{{display:block;width:100%;height:auto;max-width:640px;margin:0 auto;--on:var(--well)}}
.note{{color:var(--soft);font-size:.88rem;margin:6px 0 0}}
.say{{color:var(--soft)}}.warn{{background:var(--warn);border-left:4px solid var(--c4);padding:8px 12px;
border-radius:4px;overflow-wrap:anywhere}}
.wide{{overflow-x:auto;max-width:100%}}
table{{border-collapse:collapse;font-size:.9rem}}
th,td{{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}}
td:first-child:not(.b){{white-space:nowrap}}.b{{overflow-wrap:anywhere;min-width:11em}}th{{color:var(--soft);font-weight:600}}
.n{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
details{{margin:4px 0}}summary{{cursor:pointer;color:var(--link)}}
{RULES}
@media (max-width:480px){{body{{padding:0 10px 24px}}figure{{padding:10px 6px}}}}
@media print{{:root{{{ON_LIGHT}--paper:#fff;--well:#fff;--link:#000}}nav,.save{{display:none}}
body{{max-width:none;font-size:10.5pt;padding:0}}figure,tr,.wide{{break-inside:avoid}}h2,h3{{break-after:avoid}}
section{{display:block}}figure{{display:inline-block;vertical-align:top;width:48%;margin:0 1% 14px 0;padding:4px 0}}}}
"""

# A figure as a file: the drawing with the colours of paper, and the same on a canvas.
SCRIPT = f"""
const style={(":root,svg{" + ON_LIGHT + "background:#fff}" + RULES)!r};
function file(svg){{const copy=svg.cloneNode(true),box=svg.viewBox.baseVal,css=document.createElementNS(
'http://www.w3.org/2000/svg','style');css.textContent=style;copy.prepend(css);
copy.setAttribute('xmlns','http://www.w3.org/2000/svg');copy.setAttribute('width',box.width*3);
copy.setAttribute('height',box.height*3);
return new Blob([new XMLSerializer().serializeToString(copy)],{{type:'image/svg+xml'}});}}
function save(blob,name){{const a=document.createElement('a');a.href=URL.createObjectURL(blob);a.download=name;
a.click();setTimeout(()=>URL.revokeObjectURL(a.href),1000);}}
function png(blob,name){{const image=new Image(),url=URL.createObjectURL(blob);image.onload=()=>{{
const c=document.createElement('canvas');c.width=image.width;c.height=image.height;const x=c.getContext('2d');
x.fillStyle='#fff';x.fillRect(0,0,c.width,c.height);x.drawImage(image,0,0);URL.revokeObjectURL(url);
c.toBlob(made=>save(made,name));}};image.src=url;}}
for(const place of document.querySelectorAll('.save')){{const svg=place.closest('figure').querySelector('svg');
for(const kind of ['SVG','PNG']){{const b=document.createElement('button');b.textContent=kind;b.type='button';
b.onclick=()=>kind==='SVG'?save(file(svg),place.dataset.name+'.svg'):png(file(svg),place.dataset.name+'.png');
place.append(b);}}}}
"""
