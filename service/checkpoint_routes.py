"""POST /admin/v1/sequences/{id}/checkpoint and /admin/v1/restore: a running request to a file, and back.

    checkpoint   answered as an action is (admin_actions.py), when the file is written
    restore      answered as the request that was saved, whole or streamed: the rest of its answer

A restored request is its owner's again: listed and ended under /v1/requests by its key. Whoever restores it reads it.
"""

from aiohttp import web

from service.admin import query_of
from service.admin_actions import check_site
from service.admin_bodies import RestoreFrom, SaveTo
from service.answers import ChatForm, CompletionForm
from service.body import read_body
from service.completions import deliver, form_of
from service.front_end import FRONT_END
from service.generation import Generation
from service.json_answers import encoded_answer
from service.middleware import CALLER, ID
from service.questions import SaveCheckpoint


async def checkpoint(request: web.Request) -> web.Response:
    """Also while the server drains: then it is of most use."""
    check_site(request)
    query_of(request, ())
    front_end = request.app[FRONT_END]
    front_end.loaded()
    body = await read_body(request, SaveTo)
    question = SaveCheckpoint(request.match_info["of"], body.path, request[CALLER].owner)
    return encoded_answer(await front_end.engine.ask(question))


async def restore(request: web.Request) -> web.StreamResponse:
    """Answers as /v1/chat/completions if the request was a chat, in whatever form, else as /v1/completions."""
    check_site(request)
    query_of(request, ())
    front_end = request.app[FRONT_END]
    model = front_end.ready()
    body = await read_body(request, RestoreFrom)
    front_end.check_room()
    model.client.check_admission(1)
    interval = front_end.settings.stream_interval if body.stream else 1
    caller = request[CALLER]
    generation, restored, told = await Generation.restore(
        body, model, front_end.engine, caller=caller, interval=interval
    )
    request[ID] = restored.request_id
    kind = CompletionForm if restored.form == "completion" else ChatForm
    more = {"restored_tokens": len(restored.tokens) - restored.text_begin}
    form = form_of(kind, request, told, model, model.check_name(None), more=more)
    return await deliver(request, told, generation, form)
