"""`gguf-bridge serve`: a model behind OpenAI's and Ollama's HTTP interfaces.

    server.py            the socket, uvicorn, and how it ends
    app.py               paths to answers: keys, limits, errors, clients that go
    request_json.py      a request's JSON -> what to generate; whatever is not supported is refused by name
    jobs.py              what to generate -> sequences for the engine: prompts in token ids, samplers, grammars
    response_json.py     what was generated -> OpenAI's JSON, whole or as events
    responses_request.py, responses_answer.py  the same of OpenAI's Responses API, by way of request_json
    ollama.py, ollama_answer.py  the same of Ollama's interface
    llama_server.py      llama-server's own paths: tokens, settings, sequences
    engine.py            one thread that owns the model and advances a `Batch`; asyncio in front of it
    streams.py           what comes from there as responses, while the client is there
    metrics.py           counts, in the text format of Prometheus
    page.html            the chat at /

Needs starlette and uvicorn: the extra `serve`.
"""
