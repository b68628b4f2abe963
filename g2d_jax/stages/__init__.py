"""The stages of a run: sft, online, collect, offline, evaluate. Each reads and writes artefacts, a manifest last."""
