"""`kanerva explore`: a memory in the browser. The page asks, this package answers.

app      routes        guard    who may ask          server   a socket, an address, a browser
session  one client's memory and its history         library  models, runs and sets by name
answers  what the page shows of a memory             script   the same calls as Python
pixels   images as text, cues                        upload   files that others made
"""
