#!/bin/sh
# Debian's Chromium in a folder of its own, for users who are not root: `chromium.sh FOLDER` makes FOLDER/chromium.
# It downloads Chromium, and what it needs and this machine lacks. Nothing is installed.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
apt="apt-get -qq -o Dir::State=$folder/state -o Dir::Cache=$folder/cache -o Debug::NoLocking=1"
apt="$apt -o Dir::State::status=/var/lib/dpkg/status -o APT::Sandbox::User="
mkdir -p "$folder/state/lists/partial" "$folder/cache/archives/partial" "$folder/root"
$apt update
# Also where they are installed: all files of Chromium are to be in one folder.
$apt install --yes --no-install-recommends --reinstall --download-only \
  chromium chromium-common fonts-dejavu-core > "$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
for package in "$folder"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$folder/root"; done
rm -rf "$folder/state" "$folder/cache" "$folder/log"

# Some packages look for libraries of their own under an absolute path, such as /usr/lib/x86_64-linux-gnu/pulseaudio.
libraries=$(find "$folder/root" -path "*/$(uname -m)-linux-gnu*" -name '*.so*' -printf '%h\n' | sort -u | paste -s -d :)

cat > "$folder/chromium.new" << END
#!/bin/sh
root='$folder/root'
export LD_LIBRARY_PATH='$libraries'
export XDG_DATA_HOME="\$root/usr/share" # with its fonts
[ -d /etc/fonts ] || export FONTCONFIG_PATH="\$root/etc/fonts"
exec "\$root/usr/lib/chromium/chromium" "\$@"
END
chmod +x "$folder/chromium.new"
"$folder/chromium.new" --version # it starts, or says which library it lacks
mv "$folder/chromium.new" "$folder/chromium"
