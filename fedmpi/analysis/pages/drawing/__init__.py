"""Figures as pictures: SVG that follows the page's colours (svg.py and beside it), PNG by matplotlib (raster.py)."""
