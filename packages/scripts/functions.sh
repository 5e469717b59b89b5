# What the scripts of all three packages share, for dpkg and for rpm; the lines above say which package it is.

booted_with_systemd() { [ -d /run/systemd/system ]; }

# Another installation's files would be overwritten, or its units would hide those of the package.
refuse_other_installations() {
    if [ -e /opt/drover/current ]; then
        echo "$NAME: Drover is here already, installed by Ansible: remove it first (ansible/remove.yml; data stays)" >&2
        exit 1
    fi
    for unit in $UNITS; do
        if [ -e "/etc/systemd/system/$unit" ] && [ "$(readlink "/etc/systemd/system/$unit")" != /dev/null ]; then
            echo "$NAME: /etc/systemd/system/$unit is of an installation by hand: stop it and move it away first" >&2
            exit 1
        fi
    done
}

make_user() { echo "$USER_LINE" | systemd-sysusers -; }

make_folders() {
    systemd-tmpfiles --create "/usr/lib/tmpfiles.d/$NAME.conf" ||
        echo "$NAME: not all of /usr/lib/tmpfiles.d/$NAME.conf could be applied; the next boot tries again" >&2
}

# Settings may name secrets later: nobody but root writes them, nobody but the service reads them.
protect_settings() {
    if [ -e "$SETTINGS" ]; then
        chown root:drover "$SETTINGS"
        chmod 0640 "$SETTINGS"
    fi
}

say_first_steps() {
    echo "$NAME is installed. It does not run yet, and does not start at boot:"
    echo "$STEPS"
}

read_units_again() {
    if booted_with_systemd; then systemctl daemon-reload; fi
}

# Before the files change. The collector stops, so that it never acts with half of two versions; agents spool meanwhile.
before_upgrade() {
    if booted_with_systemd && [ "$STOP_FIRST" = yes ] && systemctl --quiet is-active "$SERVICE"; then
        touch "/run/$NAME.was-running"
        systemctl stop "$SERVICE"
    fi
}

# What ran before runs again with the new files; what did not run stays so.
after_upgrade() {
    if booted_with_systemd; then
        systemctl daemon-reload
        if [ -e "/run/$NAME.was-running" ]; then
            rm "/run/$NAME.was-running"
            systemctl start "$SERVICE"
        else
            # shellcheck disable=SC2086  # several units
            systemctl try-restart $UNITS
        fi
    fi
}

before_removal() {
    if booted_with_systemd; then
        # shellcheck disable=SC2086  # several units
        systemctl --quiet disable --now $UNITS
    else
        for unit in $UNITS; do rm -f /etc/systemd/system/*.wants/"$unit"; done
    fi
}

remove_environment() {
    rm -rf "$ENVIRONMENT" # with what an operator installed into it with pip
    for folder in /opt/drover/env /opt/drover; do
        if [ -d "$folder" ]; then rmdir --ignore-fail-on-non-empty "$folder"; fi
    done
}

# Settings that dpkg does not know, certificates, data; with the last of the packages also what they share.
purge_all() {
    # shellcheck disable=SC2086  # patterns
    rm -rf $LEFTOVERS $DATA
    for unit in $UNITS; do rm -rf "/etc/systemd/system/$unit.d"; done
    for path in $OTHERS; do
        if [ -e "$path" ]; then return; fi # of a package that is installed, or removed and not purged
    done
    rm -rf /etc/drover /var/lib/drover /run/drover
    rm -f /etc/udev/rules.d/70-drover.rules
    if getent passwd drover >/dev/null; then userdel drover; fi
    if getent group drover >/dev/null; then groupdel drover; fi
}
