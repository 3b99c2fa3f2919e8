-- wrk script: every connection POSTs the body given as first argument, again and again; exact totals at the end.

function init(args)
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  wrk.body = args[1]
end

function done(summary)
  local errors = summary.errors
  io.write(string.format(
    'totals {"requests": %d, "bytes": %d, "refused": %d, "broken": %d}\n',
    summary.requests, summary.bytes, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
