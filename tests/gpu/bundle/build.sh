#!/bin/bash
# Packs what a GPU machine without a network needs: build.sh FOLDER [PYTHON with torch and transformers | MODELS]
# FOLDER gets site.tar.xz (sglang 0.5.17, 44 MiB), models.tar.xz (8 MiB), wheels/ (Ansible, 2.4 MiB); 1 GB of work space.
# MODELS: a folder with target/, drafter/ and random-drafter/ of tests/rehearsal/make_models.py, for the set `deploy`.
set -euo pipefail
out=$(realpath -m "${1:?folder}")
torch_python=${2:-}
here=$(dirname "$(realpath "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out/wheels" "$work"/{dl,site,models}

. "$here/download.sh"
download "$out/wheels" "$here/ansible.txt"
download "$work/dl" "$here/packages.txt"

cd "$work"
for wheel in dl/*.whl; do
    case $wheel in
        # Hopper's own library alone: flash_ops, flashmla, infllm, sm100 and triton_kernels are 97 % of the wheel.
        dl/sglang_kernel-*)
            unzip -q -o "$wheel" 'sgl_kernel/*.py' 'sgl_kernel/sm90/*' 'sgl_kernel/spatial_ops*' 'sglang_kernel*' -d site ;;
        *) unzip -q -o "$wheel" -d site ;;
    esac
done
cd site
rm -rf sglang/test sglang/multimodal_gen flashinfer/data
for data in *.data; do
    [ -d "$data" ] || continue
    for kind in purelib platlib; do [ ! -d "$data/$kind" ] || cp -r "$data/$kind/." .; done
    [ ! -d "$data/scripts" ] || { mkdir -p bin; cp "$data"/scripts/* bin/; chmod +x bin/*; }
    rm -rf "$data"
done
python3 "$here/patch_site.py" .
find . -name __pycache__ -type d -prune -exec rm -rf {} +
cd ..
tar -C site --sort=name --owner=0 --group=0 -cf - . | xz -9e >"$out/site.tar.xz"

if [ -d "$torch_python" ]; then
    tar -C "$torch_python" --sort=name --owner=0 --group=0 -cf - target drafter random-drafter | xz -9e >"$out/models.tar.xz"
elif [ -n "$torch_python" ]; then
    (cd models && "$torch_python" "$here/make_tiny_models.py")
    tar -C models --sort=name --owner=0 --group=0 -cf - tiny_w draft | xz -9e >"$out/models.tar.xz"
fi
cc -O1 -o "$out/dcgm-exporter" "$here/../cuda_holder.c" -ldl
cc -O1 -o "$out/tini" "$here/../tini.c"
du -sh "$out"
