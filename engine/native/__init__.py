"""The PyTorch engine: ordinary decoder models on a CPU or a CUDA card, behind `engine/protocol.py`.

Nothing is imported here, so that naming the package costs no torch import; the engine is `engine.native.engine`.
"""
