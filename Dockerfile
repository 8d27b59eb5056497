# One image for every part: relay, worker, router, tools.
FROM python:3.12-slim AS build
WORKDIR /src
COPY requirements-runtime.lock ./
RUN python -m venv /opt/kvatlas && /opt/kvatlas/bin/pip install --no-cache-dir --require-hashes -r requirements-runtime.lock
COPY pyproject.toml README.md ./
COPY relays relays
COPY streams streams
COPY index index
COPY router router
COPY schemas schemas
COPY ops ops
RUN /opt/kvatlas/bin/pip install --no-cache-dir --no-deps .

FROM python:3.12-slim
RUN useradd --system --no-create-home kvatlas
COPY --from=build /opt/kvatlas /opt/kvatlas
ENV PATH=/opt/kvatlas/bin:$PATH KVATLAS_LOG_FORMAT=json PYTHONUNBUFFERED=1
USER kvatlas
ENTRYPOINT ["kvatlas"]
CMD ["--help"]
