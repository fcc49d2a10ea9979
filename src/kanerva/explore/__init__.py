"""`kanerva explore`: a memory in the browser. The page asks, this package answers.

server    a socket, an address, a browser         library   models, runs and sets by name
guard     who may ask                             session   one client's memory and its history
app       the routes                              answers   what the page shows of a memory
asked     what requests hold                      script    the same calls as Python
pixels    images as text, cues                    shelf     a store
upload    files that others made                  static/   the page itself
"""
