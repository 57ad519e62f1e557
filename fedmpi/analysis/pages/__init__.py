"""Runs as one page of HTML: sections of what was recorded (sections/), drawn (drawing/) and put together (page.py)."""
