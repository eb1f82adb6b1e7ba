#!/bin/sh
# The user of the images, who owns the folder of caches and nothing else.
set -eu
groupadd --gid 10001 ebbtide
useradd --uid 10001 --gid 10001 --home-dir /cache --create-home --shell /usr/sbin/nologin ebbtide
