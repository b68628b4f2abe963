"""Studies: one config under many overrides. A stage that several points share is computed once.

points.py   the points of a study, each a config of its own
graph.py    their stages as one graph, in which stages that would compute the same are one node
run.py      run the graph, on one machine or on several that share the directory
"""
