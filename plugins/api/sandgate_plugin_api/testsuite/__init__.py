"""The tests that every backend passes, built in or not::

    pip install 'sandgate-plugin-api[testsuite]'
    pytest --pyargs sandgate_plugin_api.testsuite --backend NAME --backend-config FILE

NAME is a backend of an installed plugin, found as the gateway finds it. FILE, which may be left out, is a configuration
file of a gateway: its table ``[backends.NAME]`` is given to the backend. A table ``[testsuite]`` beside it speaks to the
suite:

``template``
    What sandboxes are made from; otherwise the first template that the backend lists.
``create_seconds``
    How long a create may take (60).
``addresses``
    Addresses of this machine at which its sandboxes might reach it, besides those that the suite finds. Where a sandbox is
    to have no network, a listener of the suite's must hear nothing on any of them.

The suite holds a backend to :class:`sandgate_plugin_api.Backend`, method by method: what it claims must work, what it does
not claim must be refused, and after every test nothing may be left that was not there before. What the template's own
agent does is looked at only as far as shows that it is sandgate's agent and that it works in this kind of sandbox.

Modules: ``deployment`` (folders, backends on them, what is left), ``box`` (one sandbox and its agent), ``crash`` (a process
that is killed in the middle of a create), ``pulse`` (whether the event loop goes on), and the tests.
"""

__all__: list[str] = []
