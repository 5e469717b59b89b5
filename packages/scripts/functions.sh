# What the scripts of all three packages share, for dpkg and for rpm; the lines above say which package it is.

booted_with_systemd() { [ -d /run/systemd/system ]; }

# A unit that an administrator has masked is a link to /dev/null.
is_by_hand() { [ -e "/etc/systemd/system/$1" ] && [ "$(readlink "/etc/systemd/system/$1")" != /dev/null ]; }

# Another installation's files would be overwritten, or its units would hide those of the package.
refuse_other_installations() {
    if [ -e /opt/drover/current ]; then
        echo "$NAME: Drover is here already, installed by Ansible: remove it first (ansible/remove.yml; data stays)" >&2
        exit 1
    fi
    for unit in $UNITS; do
        if is_by_hand "$unit"; then
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

# A package that is half configured stops each later run of apt on the node; its unit goes on trying to start.
say_not_started() {
    echo "$NAME: $SERVICE did not start with the new files; journalctl -u $SERVICE says why" >&2
}

# What ran before runs again with the new files; what did not run stays so.
after_upgrade() {
    if booted_with_systemd; then
        systemctl daemon-reload
        if [ -e "/run/$NAME.was-running" ]; then
            rm "/run/$NAME.was-running"
            systemctl start "$SERVICE" || say_not_started
        else
            # shellcheck disable=SC2086  # several units
            systemctl try-restart $UNITS || say_not_started
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

# Data may lie on a disk that is mounted there: its folder stays then, and the purge goes on.
remove_all() { rm -rf "$@" || echo "$NAME: not all of $* could be removed; look there" >&2; }

# A package that was removed and not purged: Drover may have been installed another way since, with the same folders.
is_installed_otherwise() {
    if [ -e /opt/drover/current ]; then return 0; fi
    for unit in $UNITS; do
        if is_by_hand "$unit"; then return 0; fi
    done
    return 1
}

# The account may be a person's, or of a directory server: only one that systemd-sysusers makes is removed.
remove_user() {
    if grep -q '^drover:[^:]*:[0-9]\{1,3\}:' /etc/passwd; then
        userdel drover || echo "$NAME: the user drover could not be removed" >&2
    fi
    if grep -q '^drover:[^:]*:[0-9]\{1,3\}:' /etc/group && ! grep -q '^drover:' /etc/passwd; then
        groupdel drover || echo "$NAME: the group drover could not be removed" >&2
    fi
}

# Settings that dpkg does not know, certificates, data; with the last of the packages also what they share.
purge_all() {
    if is_installed_otherwise; then
        echo "$NAME: Drover is installed here in another way now; its settings and data stay" >&2
        return
    fi
    # shellcheck disable=SC2086  # patterns
    remove_all $LEFTOVERS $DATA
    for unit in $UNITS; do remove_all "/etc/systemd/system/$unit.d"; done
    for path in $OTHERS; do
        if [ -e "$path" ]; then return; fi # of a package that is installed, or removed and not purged
    done
    keys=$(find /etc/drover /var/lib/drover -name ca.key 2>/dev/null || true)
    if [ -n "$keys" ]; then # without it no certificate of the fleet can be renewed, on other machines too
        echo "$NAME: an authority's key stays, and its folder: $keys" >&2
        return
    fi
    remove_all /etc/drover /var/lib/drover /run/drover
    rm -f /etc/udev/rules.d/70-drover.rules
    remove_user
}
