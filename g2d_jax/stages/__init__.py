"""The stages of a run: sft, online, collect, offline, evaluate. Each reads artefacts, writes artefacts, and a manifest last."""
