"""Studies: one config under many overrides, every stage that several points share computed once.

points.py    the points of a study, each a config of its own
graph.py     their stages as one graph; stages that would compute the same are one node
contents.py  the files and other runs that a stage reads, by content
run.py       run the graph, on one machine or on several that share the directory
"""
