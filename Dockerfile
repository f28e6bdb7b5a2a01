# The sandbox alone: untrusted Python over HTTP, without torch.
#
#   docker build -t rstar2-sandbox .
#   docker run -p 8088:8088 -e RSTAR2_CODEENV_TOKEN=SECRET rstar2-sandbox
#
# Options after the image's name are those of `rstar2 codeenv serve`. docs/sandbox.md has a compose
# file with all restrictions that the server can live with.

FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl \
    && rm -r /wheels /tmp/constraints.txt \
    && useradd --create-home --uid 10001 sandbox
USER sandbox
WORKDIR /home/sandbox
EXPOSE 8088
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8088/health', timeout=4)"]
# A container has no namespaces to give: programs are confined by seccomp, Landlock and limits.
ENTRYPOINT ["rstar2", "codeenv", "serve", "--host", "0.0.0.0", "--port", "8088", \
    "--isolation", "portable"]
