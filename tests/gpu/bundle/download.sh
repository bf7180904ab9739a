# Sourced: download FOLDER REQUIREMENTS fetches wheels for Python 3.12 on x86-64, whatever runs here.
download() {
    local words=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
    local n
    for n in 39 35 34 31 28 27 26 24 17 12 5; do words+=(--platform "manylinux_2_${n}_x86_64"); done
    for n in 2014 2010 1; do words+=(--platform "manylinux${n}_x86_64"); done
    python3 -m pip download -q "${words[@]}" -d "$1" -r "$2"
}
