"""`kanerva explore`: a memory in the browser. This package answers the page's requests.

server    socket, address and browser             library   models, runs and data sets by name
guard     access control                          session   one client's memory and its history
app       the routes                              answers   what the page shows of a memory
asked     schemas of requests                     script    the same calls as Python
pixels    images as text, cues                    shelf     a store
upload    image files that users upload           static/   the page itself
"""
