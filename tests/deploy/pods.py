"""Pods of a rendered chart as processes of this machine, started, probed and ended as Kubernetes would do it.

From the chart come the commands (of init containers, too), the variables, the settings file, the ports, the probes with
their names and thresholds, the preStop command, the grace period, names of pods and Services, and which Service has
which pod. Replaced are: the address of each pod by one of loopback (`server.host`), DNS by names/sitecustomize.py, and
the paths of mounted files. Periods of probes and minReadySeconds are multiplied by `pace` to shorten them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.chart import Manifests, Object, component_of, container_of

NAMES = Path(__file__).with_name("names")
READY_SECONDS = 120.0
MAX_PODS = 40
PROGRAMS = {"python": sys.executable, "outrider": str(Path(sys.executable).with_name("outrider"))}


@dataclass(frozen=True, slots=True)
class End:
    """The end of a pod."""

    status: int
    was_killed: bool  # because its grace period had passed


class Pod:
    """A pod with one container. A thread probes it, in place of the kubelet."""

    def __init__(self, machine: Machine, workload: Object, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.component = component_of(workload)
        self.is_ready = False
        self.is_ending = False
        self.num_restarts_due = 0  # restarts that Kubernetes would have made for liveness
        self._machine = machine
        self._spec = workload["spec"]["template"]["spec"]
        self._container = container_of(workload)
        for container in self._spec.get("initContainers", []):
            environ = self._environ(container)
            subprocess.run(self._command(container["command"]), env=environ, check=True, timeout=READY_SECONDS)
        self._log = (machine.directory / f"{name}-{random.randrange(1 << 32):x}.log").open("wb+")
        self.process = subprocess.Popen(
            self._command(self._container["command"]), env=self._environ(), stdout=self._log, stderr=self._log
        )
        self._prober = threading.Thread(target=self._probe_until_the_end, name=f"probes of {name}", daemon=True)
        self._prober.start()

    def log(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode()

    def wait_ready(self) -> None:
        """Waits until the pod has been ready for minReadySeconds, as an update does."""
        self._machine.wait(lambda: self.is_ready or self.process.poll() is not None, f"{self.name} ready")
        assert self.process.poll() is None, f"{self.name} ended:\n{self.log()}"

    def end(self) -> End:
        """Ends the pod as Kubernetes does: preStop, SIGTERM, and SIGKILL after the grace period."""
        grace_seconds = self._spec["terminationGracePeriodSeconds"] + self._machine.spare_seconds
        deadline = time.monotonic() + grace_seconds
        self.is_ending = True
        self._machine.tell_names()
        before = self._container.get("lifecycle", {}).get("preStop")
        if before is not None:
            subprocess.run(self._command(before["exec"]["command"]), env=self._environ(), check=True, timeout=60)
        self.process.send_signal(signal.SIGTERM)
        was_killed = False
        try:
            self.process.wait(deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            was_killed = True
        self.kill()
        return End(self.process.returncode, was_killed)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(60)
        self._prober.join(60)

    def _command(self, words: list[str]) -> list[str]:
        return [PROGRAMS.get(words[0], words[0]), *words[1:]]

    def _environ(self, container: Object | None = None) -> dict[str, str]:
        mounts = self._machine.mounts
        environ = {**os.environ, "PYTHONPATH": str(NAMES), "NAMES_FILE": str(self._machine.names_file)}
        for variable in (container or self._container)["env"]:
            value = variable.get("value")
            if value is None:
                value = self._machine.value_from(variable["valueFrom"], self)
            for path, folder in mounts.items():
                value = value.replace(path, str(folder))
            environ[variable["name"]] = value
        environ["OUTRIDER_SERVER__HOST"] = self.address
        return {**environ, **self._machine.overrides.get(self.component, {})}

    # ------------------------------------------------------------ probes

    def _probe_until_the_end(self) -> None:
        startup, readiness, liveness = (
            self._container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")
        )
        # `pace` does not shorten the time for the start, because processes start no faster here than in a cluster.
        start_by = time.monotonic() + startup["periodSeconds"] * startup["failureThreshold"]
        while not self._passes(startup):
            if self._pause(startup) or time.monotonic() > start_by:
                return
        next_at = {"readiness": 0.0, "liveness": 0.0}
        failures = dict.fromkeys(next_at, 0)
        while self.process.poll() is None:
            for name, probe in (("readiness", readiness), ("liveness", liveness)):
                if time.monotonic() < next_at[name] or (name == "liveness" and self.is_ending):
                    continue
                failures[name] = 0 if self._passes(probe) else failures[name] + 1
                next_at[name] = time.monotonic() + probe["periodSeconds"] * self._machine.pace
                if name == "readiness" and (failures[name] in (0, probe["failureThreshold"])):
                    self._set_ready(is_ready=failures[name] == 0)
                if name == "liveness" and failures[name] >= probe["failureThreshold"] and not self.is_ending:
                    self.num_restarts_due += 1
            time.sleep(0.01)
        self._set_ready(is_ready=False)

    def _pause(self, probe: Object) -> bool:
        """Waits until the next time for the probe. Returns True if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(probe["periodSeconds"] * self._machine.pace)
        return self.process.poll() is not None

    def _set_ready(self, *, is_ready: bool) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._machine.tell_names()

    def _passes(self, probe: Object) -> bool:
        if "grpc" in probe:
            with grpc.insecure_channel(
                f"{self.address}:{probe['grpc']['port']}", options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
                try:
                    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe["timeoutSeconds"])
                except grpc.RpcError:
                    return False
                return answer.status == health_pb2.HealthCheckResponse.SERVING
        if "exec" in probe:
            words = [
                self._machine.mounted(word).replace("127.0.0.1", self.address) for word in probe["exec"]["command"]
            ]
            try:
                done = subprocess.run(
                    self._command(words),
                    env=self._environ(),
                    check=False,
                    timeout=probe["timeoutSeconds"],
                    capture_output=True,
                )
            except subprocess.TimeoutExpired:
                return False
            return done.returncode == 0
        (port,) = (p["containerPort"] for p in self._container["ports"] if p["name"] == probe["httpGet"]["port"])
        connection = http.client.HTTPConnection(self.address, port, timeout=probe["timeoutSeconds"])
        try:
            connection.request("GET", probe["httpGet"]["path"])
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Machine:
    """All pods of a release. As a context manager, kills them after the block."""

    def __init__(
        self,
        manifests: Manifests,
        directory: Path,
        *,
        pace: float,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        mounts: Mapping[str, Path] | None = None,
        overrides: Mapping[str, Mapping[str, str]] | None = None,
        elsewhere: Mapping[str, list[str]] | None = None,
        spare_seconds: float = 0.0,
    ) -> None:
        """`mounts`: folders here by path in containers. `overrides`: variables by component. `elsewhere`: by name of a
        headless Service, the "ip:port" addresses that replace those of its pods. `spare_seconds`: time that a pod has
        in addition to its grace period before it is killed, because this machine may be busy.
        """
        self.manifests, self.directory, self.pace = manifests, directory, pace
        self.secrets, self.overrides = secrets or {}, dict(overrides or {})
        self._elsewhere = elsewhere or {}
        self.spare_seconds = spare_seconds
        self.names_file = directory / "names.json"
        self.pods: list[Pod] = []
        self.ends: list[tuple[str, End]] = []
        self._lock = threading.Lock()
        net = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self.addresses = [f"{net}.{number}" for number in range(1, MAX_PODS + 1)]  # new pods get them in this order
        self._num_addresses = 0
        (config,) = manifests.of_kind("ConfigMap")
        settings = directory / "settings"
        settings.mkdir()
        self.mounts = {"/etc/outrider": settings, **(mounts or {})}
        for name, text in config["data"].items():
            (settings / name).write_text(self.mounted(text), encoding="utf-8")
        self.tell_names()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for pod in self.pods:
            pod.kill()

    def mounted(self, text: str) -> str:
        """Returns the text with paths in containers replaced by paths on this machine."""
        for path, folder in self.mounts.items():
            text = text.replace(path, str(folder))
        return text

    def start(self, component: str) -> list[Pod]:
        """Starts as many pods as the component has replicas, without waiting until they are ready."""
        workload = self.manifests.workloads()[component]
        return [self.start_pod(component, number) for number in range(workload["spec"]["replicas"])]

    def start_pod(self, component: str, number: int, *, address: str = "") -> Pod:
        """Starts a pod. In a StatefulSet its name ends with the number, otherwise with a new random suffix."""
        workload = self.manifests.workloads()[component]
        has_identity = workload["kind"] == "StatefulSet"
        suffix = str(number) if has_identity else f"{random.randrange(1 << 20):05x}"
        pod = Pod(self, workload, f"{workload['metadata']['name']}-{suffix}", address or self.next_address())
        with self._lock:
            self.pods.append(pod)
        self.tell_names()
        return pod

    def next_address(self) -> str:
        self._num_addresses += 1
        return self.addresses[self._num_addresses - 1]

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.component == component]

    def ready_addresses(self, component: str) -> list[str]:
        """Returns the addresses to which a Service would send new connections."""
        return [pod.address for pod in self.of(component) if pod.is_ready and not pod.is_ending]

    def roll(self, component: str) -> None:
        """Replaces every pod of a component, from the last to the first, as an update of a StatefulSet does."""
        for pod in reversed(self.of(component)):
            self.replace(pod)

    def replace(self, pod: Pod) -> None:
        """Replaces a pod by its workload's strategy. A StatefulSet's pod ends first, since the new pod has its name."""
        workload = self.manifests.workloads()[pod.component]
        spec = workload["spec"]
        number = int(pod.name.rpartition("-")[2], 16)
        if workload["kind"] == "StatefulSet":
            self.end(pod)
            self._wait_available(self.start_pod(pod.component, number, address=pod.address), spec)
            return
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        self._wait_available(self.start_pod(pod.component, number), spec)
        self.end(pod)

    def end(self, pod: Pod) -> None:
        self.ends.append((pod.component, pod.end()))
        with self._lock:
            self.pods.remove(pod)
        self.tell_names()

    def _wait_available(self, pod: Pod, spec: Object) -> None:
        pod.wait_ready()
        deadline = time.monotonic() + spec["minReadySeconds"] * self.pace
        while time.monotonic() < deadline:
            assert pod.is_ready, f"{pod.name} became unready:\n{pod.log()}"
            time.sleep(0.01)

    def tell_names(self) -> None:
        """Writes the names that DNS would have: those of headless Services, and of each of their pods."""
        with self._lock:
            names: dict[str, list[str]] = {}
            for service in self.manifests.of_kind("Service"):
                spec, name = service["spec"], service["metadata"]["name"]
                shows_all = spec.get("publishNotReadyAddresses", False)
                pods = [pod for pod in self.pods if pod.component == component_of(service)]
                shown = [pod for pod in pods if shows_all or (pod.is_ready and not pod.is_ending)]
                if spec.get("clusterIP") == "None":
                    names[name] = [pod.address for pod in shown]
                    names |= {f"{pod.name}.{name}": [pod.address] for pod in shown}
            names |= self._elsewhere
            fresh = self.names_file.with_suffix(".new")
            fresh.write_text(json.dumps(names), encoding="utf-8")
            fresh.replace(self.names_file)

    def value_from(self, source: Mapping[str, Any], pod: Pod) -> str:
        if "fieldRef" in source:
            assert source["fieldRef"] == {"fieldPath": "metadata.name"}
            return pod.name
        if "secretKeyRef" in source:
            return self.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        raise AssertionError(f"nothing here gives {source}")

    def wait(self, condition, what: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come about in {READY_SECONDS:g} s"
            time.sleep(0.02)
