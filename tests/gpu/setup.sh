#!/bin/bash
# Unpacks what a GPU machine without a network needs: setup.sh BUNDLE [TARGET=/tmp/gpu-session]
# Ansible and setproctitle first; SGLang goes on in the background, TARGET/site.ready says when it is whole.
set -euo pipefail
bundle=$(realpath "${1:?folder with site.tar.xz, models.tar.xz, wheels/}")
target=${2:-/tmp/gpu-session}
here=$(dirname "$(realpath "$0")")
mkdir -p "$target"/{bin,site,models,home,work,tools}

python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$target/tools" "$bundle"/wheels/*.whl
cat >"$target/bin/ansible-playbook" <<SCRIPT
#!/bin/sh
export LC_ALL=C.UTF-8 ANSIBLE_HOME=$target/ansible
PYTHONPATH=$target/tools exec python3 $target/tools/bin/ansible-playbook "\$@"
SCRIPT
chmod +x "$target/bin/ansible-playbook"

cc -O1 -o "$target/bin/dcgm-exporter" "$here/cuda_holder.c" -ldl || cp "$bundle/dcgm-exporter" "$target/bin/"
cc -O1 -o "$target/bin/tini" "$here/tini.c" || cp "$bundle/tini" "$target/bin/"

if [ -e "$bundle/site.tar.xz" ]; then
    (
        tar -C "$target/models" -xJf "$bundle/models.tar.xz"
        [ ! -e "$bundle/jit-caches.tar.xz" ] || tar -C "$target" -xJf "$bundle/jit-caches.tar.xz"
        tar -C "$target/site" -xJf "$bundle/site.tar.xz"
        # Images often come without bytecode: torch's own too, or every start pays for it.
        packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX="$target/pyc" python3 -m compileall -q -j 0 "$target/site" \
            "$packages"/{torch,triton,sympy,mpmath,numpy,networkx} >/dev/null || true
        touch "$target/site.ready"
    ) >"$target/setup.log" 2>&1 &
fi
