"""NVIDIA MPS: `watch` polls the control daemon; `supervision` and `daemon` run it for `gpushare-agent mps`."""
