"""Entry point `vllm.general_plugins`: makes vLLM know the connector by name.

vLLM loads it in the frontend, in EngineCore, in every worker and in the model-registry subprocess, so nothing is
imported at top level and a second registration is a no-op (registering a name twice raises inside vLLM).
"""

CONNECTOR_NAME = "TieredOffloadConnector"
CONNECTOR_MODULE = "vllm_tiered_offload.connector.connector"


def register() -> None:
    """Register `TieredOffloadConnector` with vLLM's connector factory; the connector's own module stays unimported."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
