"""The store's atomic operations, as Lua scripts for a Valkey server.

All scripts except `ADD_RECEIPT` have the same two keys: the request (a hash, whose field `owner` names the router that
serves it) and the request's tokens (a list of packed spans). Times are durations in milliseconds, so clocks need not
agree. A request and its tokens expire in the same millisecond, because time stands still while a script runs.

A server that is out of memory refuses a script only at the script's first write, and only if that write adds data.
"""

from __future__ import annotations

OWNED, ABORTED, TAKEN, MISSING = 0, 1, 2, 3
"""Return values of RENEW."""

# ARGV: owner, lease, then the hash's other fields and values. The first HSET precedes DEL, so that a server that is out
# of memory refuses the script before anything is deleted. DEL includes the tokens, because a server may have evicted
# only the hash.
CREATE = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'owner', ARGV[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2] + redis.call('HGET', KEYS[1], 'window'))
return 1
"""

# ARGV: owner, then sample, start position, end position and token ids of each span. The part of a span that is already
# stored is cut off, so that a router that got no answer may send the span again with more tokens. Spans after a gap are
# skipped. A list entry is sample, start position and token ids, each a little-endian uint32. A new list expires with
# its request.
APPEND = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
for i = 2, #ARGV, 4 do
  local field = 'end:' .. ARGV[i]
  local known = tonumber(redis.call('HGET', KEYS[1], field) or redis.call('HGET', KEYS[1], 'start'))
  if tonumber(ARGV[i + 1]) <= known and known < tonumber(ARGV[i + 2]) then
    local new = string.sub(ARGV[i + 3], 4 * (known - ARGV[i + 1]) + 1)
    if redis.call('RPUSH', KEYS[2], struct.pack('<I4I4', ARGV[i], known) .. new) == 1 then
      redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
    end
    redis.call('HSET', KEYS[1], field, ARGV[i + 2])
  end
end
return 1
"""

# ARGV: owner, lease.
RENEW = f"""
local fields = redis.call('HMGET', KEYS[1], 'owner', 'window', 'aborted')
if not fields[1] then return {MISSING} end
if fields[1] ~= ARGV[1] then return {TAKEN} end
redis.call('PEXPIRE', KEYS[1], ARGV[2] + fields[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2] + fields[2])
return fields[3] and {ABORTED} or {OWNED}
"""

# ARGV: owner.
FINISH = """
local fields = redis.call('HMGET', KEYS[1], 'owner', 'window')
if fields[1] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'finished', 1)
redis.call('PEXPIRE', KEYS[1], fields[2])
redis.call('PEXPIRE', KEYS[2], fields[2])
return 1
"""

# ARGV: owner.
DELETE = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1], KEYS[2])
"""

FIELDS = ("owner", "fingerprint", "window", "start", "request", "aborted", "numerics")
_READ = f"""
local fields = redis.call('HMGET', KEYS[1], {", ".join(map(repr, FIELDS))})
if not fields[1] then return {{}} end
"""

# Returns {} if there is no request, else {fields, spans}.
READ = _READ + "return {fields, redis.call('LRANGE', KEYS[2], 0, -1)}\n"

# ARGV: owner, lease, fingerprint. Returns the same as READ. If the fingerprint differs, the request keeps its owner.
CLAIM = (
    _READ
    + """
if fields[2] == ARGV[3] then
  redis.call('HSET', KEYS[1], 'owner', ARGV[1])
  redis.call('HDEL', KEYS[1], 'finished')
  redis.call('PEXPIRE', KEYS[1], ARGV[2] + fields[3])
  redis.call('PEXPIRE', KEYS[2], ARGV[2] + fields[3])
end
return {fields, redis.call('LRANGE', KEYS[2], 0, -1)}
"""
)

REQUEST_ABORT = """
local fields = redis.call('HMGET', KEYS[1], 'owner', 'finished')
if not fields[1] or fields[2] then return 0 end
return redis.call('HSETNX', KEYS[1], 'aborted', 1)
"""

# KEYS: the index of all receipts (a sorted set of ids by the server's time), the new receipt. ARGV: id, receipt,
# lifetime, maximum number of receipts, prefix of receipts' keys. All keys share a hash slot, because the script deletes
# the oldest receipts together with their entries in the index.
ADD_RECEIPT = """
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1 - ARGV[4])) do
  redis.call('DEL', ARGV[5] .. id)
  redis.call('ZREM', KEYS[1], id)
end
return 1
"""
