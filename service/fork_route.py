"""POST /v1/requests/{id}/fork: a second answer from where a running one stands, with other sampling parameters.

    find the parent ──▶ its parameters, and what the body says otherwise ──▶ fork ──▶ answered as the parent is

The parent may be read by another front end: what must be known of it, the engine's process tells (questions.py).
"""

from aiohttp import web

from service.answers import ChatForm, CompletionForm
from service.body import read_body
from service.completions import deliver, form_of
from service.errors import BadRequest
from service.front_end import FRONT_END
from service.generation import Generation
from service.middleware import CALLER, ID
from service.own_requests import ids_of
from service.questions import FindParent
from service.schema import ForkBody


async def fork_request(request: web.Request) -> web.StreamResponse:
    """Answers as /v1/chat/completions if the parent is a chat, in whatever form, else as /v1/completions."""
    front_end = request.app[FRONT_END]
    model = front_end.ready()
    body = await read_body(request, ForkBody)
    name = model.check_name(body.model)
    body.check_logprobs(front_end.settings.max_logprobs)
    front_end.check_room()
    model.client.check_admission(1)
    caller = request[CALLER]
    parent = await front_end.engine.ask(FindParent(caller.owner, ids_of(request), body.choice))
    if parent.form == "tools":
        raise BadRequest("A chat that was offered tools cannot be forked: its calls would be read from their middle.")
    if body.request_id is not None:
        request[ID] = body.request_id
    generation = await Generation.fork(
        body,
        parent,
        model,
        front_end.engine,
        request_id=request[ID],
        caller=caller,
        interval=front_end.settings.stream_interval if body.stream else 1,
    )
    kind = CompletionForm if parent.form == "completion" else ChatForm
    more = {"forked_from": parent.request_id, "forked_at": generation.forked_at}
    form = form_of(kind, request, body, model, name, more=more)
    return await deliver(request, body, generation, form)
