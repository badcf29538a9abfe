"""Serves llama.cpp's HTTP API from the wheel of xllamacpp, in its own environment, as `llama-server` does."""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of all slots together")
    parser.add_argument("--lookup", type=int, nargs=2, metavar=("N", "M"), help="lengths of n-gram and draft")
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.port = arguments.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.context
    params.cache_ram_mib = 0
    if arguments.lookup:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = arguments.lookup
    server = xllamacpp.Server(params)
    print("serving at", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
