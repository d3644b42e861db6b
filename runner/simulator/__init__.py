"""The simulated server: speaks ``vllm serve``'s command line, HTTP API and metrics; its step time is a cost model's."""
